"""First names for versions of a question."""

_NAMES = """\
Aaron Abby Abel Abigail Ada Adam Adele Adrian Agnes Ahmed Aisha Alan Albert Alejandro Alex Alexa
Alexander Alexis Ali Alice Alicia Allen Allison Alma Alyssa Amanda Amber Amelia Amir Amy Ana Anders
Andre Andrea Andrew Andy Angela Angie Anita Ann Anna Anne Annie Anthony Antonio Archie Ariel Arnold
Arthur Ashley Audrey Ava Barbara Barry Beatrice Becky Bella Ben Benjamin Bernard Beth Betty Bianca
Bill Billy Blake Bob Bobby Boris Brad Brandon Brenda Brian Bridget Brittany Brooke Bruce Bryan Caleb
Calvin Cameron Camila Candice Carl Carla Carlos Carmen Carol Caroline Carrie Casey Catherine Cecilia
Celia Charles Charlie Charlotte Chen Cheryl Chester Chloe Chris Christina Christine Christopher
Cindy Claire Clara Clark Claudia Clyde Cody Colin Connor Cora Craig Crystal Curtis Cynthia Dale
Damian Dan Dana Daniel Daniela Danny Daphne Darius Darren Dave David Dean Deborah Debra Dennis Derek
Diana Diane Diego Dolores Dominic Donald Donna Dora Doris Dorothy Doug Douglas Drew Dylan Earl Eddie
Edgar Edith Edna Eduardo Edward Edwin Eileen Elaine Eleanor Elena Eli Elias Elijah Elise Eliza
Elizabeth Ella Ellen Ellie Elliot Elsa Emil Emily Emma Emmanuel Enrique Eric Erica Erik Erin Ernest
Esther Ethan Eugene Eva Evan Eve Evelyn Farah Fatima Felix Fernando Fiona Florence Frances Francis
Frank Fred Frederick Gabriel Gabriela Gail Gary Gavin Gene George Gerald Gina Giovanni Gloria Gordon
Grace Graham Greg Gregory Greta Gus Gwen Haley Hank Hannah Harold Harper Harriet Harry Harvey Hassan
Heather Hector Heidi Helen Henry Herbert Howard Hugh Hugo Ian Ibrahim Ida Ingrid Irene Irma Isaac
Isabel Isabella Ismael Ivan Jack Jackie Jacob Jaime Jake James Jamie Jan Jana Jane Janet Janice
Jared Jasmine Jason Javier Jay Jayden Jean Jeanette Jeff Jeffrey Jenna Jennifer Jenny Jeremy Jerome
Jerry Jesse Jessica Jill Jim Jimmy Joan Joanna Joanne Joe Joel John Johnny Jolene Jon Jonah Jonathan
Jorge Jose Joseph Josephine Josh Joshua Joyce Juan Juanita Judith Judy Julia Julian Julie Juliet
Julio Justin Kai Karen Karim Karl Kate Katherine Kathleen Kathy Katie Kayla Keith Kelly Kelsey Ken
Kendra Kenneth Kenny Kevin Khalid Kim Kimberly Kira Kirk Kristen Kyle Kylie Lana Larry Laura Lauren
Laurie Lawrence Layla Leah Lee Leila Lena Leo Leon Leonard Leroy Leslie Lester Levi Lewis Liam Lila
Lily Linda Lisa Liz Lloyd Logan Lois Lola Lorenzo Lori Louis Louise Lucas Lucia Lucille Lucy Luis
Luke Luna Luther Lydia Lynn Mabel Mackenzie Madeline Maggie Malcolm Malik Manuel Marcela Marcia
Marco Marcus Margaret Maria Mariah Marian Marie Marilyn Marina Mario Marion Marisol Marissa Marjorie
Mark Marlene Martha Martin Marvin Mary Mason Matilda Matt Matthew Maureen Maurice Max Maya Megan
Melanie Melinda Melissa Melvin Mia Michael Michelle Miguel Mike Mila Mildred Miles Milo Mimi Miranda
Miriam Mitch Mitchell Moira Molly Mona Monica Monique Morgan Moses Myra Nadia Nancy Naomi Natalia
Natalie Natasha Nathan Neil Nell Nelson Nicholas Nick Nicole Nina Noah Noel Nora Norma Norman Olga
Oliver Olivia Omar Oscar Otto Owen Pablo Paige Pam Pamela Patricia Patrick Patsy Paul Paula Pauline
Pedro Peggy Percy Perry Pete Peter Phil Philip Phoebe Phyllis Pierre Polly Priya Quentin Quinn
Rachel Rafael Ralph Ramon Randall Randy Raquel Ravi Ray Raymond Rebecca Reggie Regina Rene Ricardo
Richard Rick Ricky Rita Rob Robert Roberta Roberto Robin Rodney Roger Roland Roman Ron Ronald Rosa
Rosalie Rosemary Rosie Roxanne Roy Rudy Russell Ruth Ryan Sabrina Sadie Sally Salma Sam Samantha
Samuel Sandra Sandy Sara Sarah Sasha Scott Sean Sebastian Selena Seth Shane Shannon Sharon Shaun
Shawn Sheila Shelby Sherry Shirley Sidney Silvia Simon Sofia Sonia Sophia Sophie Spencer Stacy
Stanley Stella Stephanie Stephen Steve Steven Stuart Susan Suzanne Sven Sylvia Tabitha Tamara Tammy
Tanya Tara Tasha Ted Teresa Terry Tess Tessa Theo Theodore Theresa Thomas Tiffany Tim Timothy Tina
Toby Todd Tom Tommy Toni Tony Tracy Travis Trevor Trisha Tristan Troy Tyler Tyrone Uma Ursula
Valentina Valerie Vanessa Vera Vernon Veronica Vicki Victor Victoria Vincent Viola Vivian Wade
Walter Wanda Warren Wayne Wendy Wesley Whitney Willa William Willie Wilma Winston Xavier Yara Yasmin
Yolanda Yusuf Yvonne Zach Zachary Zane Zara Zoe
"""

FIRST_NAMES = tuple(_NAMES.split())
"""Common in English texts, without those that are as often a month, a place or a plant."""
