"""General instructions of our own: templates times subjects, so that a drafter sees more than the questions of one dataset."""

from collections.abc import Iterator
from itertools import product
from random import Random
from string import Formatter

from specdec.errors import InvalidInputError

WORDS = {
    "topic": """
        photosynthesis; the water cycle; black holes; supply and demand; the French Revolution; machine learning; vaccines;
        earthquakes; the immune system; plate tectonics; inflation; the printing press; renewable energy; ocean currents; the
        human heart; gravity; the Silk Road; coral reefs; electric cars; the moon's phases; volcanoes; recycling; the digestive
        system; sleep; bees and pollination; blockchain; the Roman Empire; compound interest; tides; DNA; rainbows; antibiotics;
        urban planning; jazz music; chess openings; the stock market; tree rings; the speed of light; public transport; bread
        making; satellites; migration of birds; the alphabet; steam engines; the carbon cycle; batteries; democracy; magnetism;
        memory; glaciers; quantum computers; natural selection; the Cold War; climate zones; the nervous system; cryptography;
        the Industrial Revolution; nuclear fusion; the solar system; game theory; the Renaissance; plate glass; kidney function;
        the Great Wall of China; genetic engineering; the periodic table; electromagnetic waves; the Cuban missile crisis;
        opportunity cost; the placebo effect; relational databases; the ozone layer; Shakespeare's plays; impressionist
        painting; the United Nations; the theory of relativity; acids and bases; hash tables; photosensitive films; operating
        systems; the Black Death; desert plants; monsoons; probability; the scientific method; free will; Stoic philosophy;
        utilitarian ethics; the trolley problem; neural networks; the greenhouse effect; comets; the ancient Olympics; the
        invention of the telephone; mirrors and lenses; entropy; sound waves; the human eye; whales; ants and their colonies;
        fermentation; chocolate; the history of money; central banks; taxes; insurance; bridges; skyscrapers; the Suez Canal;
        opera; the violin; haiku; myths of creation; mummies; Vikings; the Aztecs; the compass; maps; time zones; leap years;
        prime numbers; fractions; the Pythagorean theorem; statistics in the news; negotiation; body language; public speaking;
        stress; nutrition labels; vitamins; allergies; first aid for burns; the common cold; exercise; sunscreen; tea; olive
        oil; cheese; rice farming; soil; composting; forests; wolves; sharks; parrots; bats; dinosaurs; fossils; meteorites;
        auroras; lightning; hurricanes; snowflakes; rivers; caves; lakes; islands; borders; passports; languages of Africa; sign
        language; handwriting; libraries; newspapers; radio; photography; film editing; video games; board games; football;
        marathons; cycling; sailing; mountain climbing; knots; locks and keys; clocks; elevators; refrigerators; microwave
        ovens; LED lamps; wind turbines; dams; nuclear waste; plastics; glass; steel; concrete; paper; cotton; silk; leather;
        shoes; kites; balloons; rockets; space suits; telescopes; computer viruses; passwords; search engines; spam; online
        shopping; spreadsheets; version control; open source software; sorting algorithms; recursion; binary numbers; floating
        point numbers
    """,
    "audience": "a ten-year-old; a high school student; a new employee; my grandmother; an expert in another field",
    "style": "a friendly; a formal; a humorous; a brief; a persuasive",
    "count": "three; five; seven; ten",
    "thing": """
        ways to save water at home; healthy breakfast ideas; tips for a job interview; games for a rainy day; reasons to learn a
        second language; questions to ask a landlord; habits of good readers; uses for old jars; steps to plan a birthday party;
        ways to stay focused; gifts for a teacher; mistakes beginners make when running; things to pack for a camping trip; easy
        vegetables to grow; ideas for a science fair; ways to thank a colleague; rules for a shared kitchen; activities for a
        long train ride; signs that a bicycle needs repair; names for a small bakery; ways to reduce stress before an exam;
        places to look for a lost phone; questions for a first date; ideas for a short film; ways to make a small room look
        larger; dishes to cook with leftover rice; books for a teenager who likes mysteries; exercises for a stiff back; jokes
        about computers; metaphors for time; names for a cat; slogans for a bicycle shop; ways to explain failure to a child;
        things to check before buying a used car; habits that save energy; reasons for a budget; topics for a debate club; ideas
        for a charity event; interview questions for a cook; facts about the ocean; unusual instruments; ways to learn
        vocabulary; signs of dehydration; tools for a beginner in woodworking; topics for a school essay; ideas for a garden on
        a balcony; ways to greet a guest; safety rules for a laboratory; ways to keep bread fresh; reasons to keep a diary;
        themes for a photo project; ways to calm a crying baby; tricks to fall asleep; errors in email etiquette; riddles for
        children; sources of protein; historic inventions; rivers of Europe; ways to test an idea cheaply; arguments for shorter
        meetings
    """,
    "person": """
        my landlord; a customer; my manager; a neighbour; the city council; a former teacher; a hotel; a friend; a school
        principal; a bank; my cousin; an airline; a new neighbour; a job applicant; an old classmate; an online shop; a museum;
        my doctor
    """,
    "matter": """
        a broken heater; a delayed delivery; a day off next Friday; noise at night; a lost umbrella; a wrong bill; a
        recommendation letter; changing an appointment; an apology for being late; an invitation to dinner; a missed flight; a
        change of address; a price increase; a leaking roof; a borrowed book; a party next door; an unpaid invoice; a group
        booking; a reference for a job; thanks for good advice; a broken window; a dog that barks; a proposal for a garden; a
        question about opening hours; a misunderstanding; the end of a contract; a raise; a surprise visit; a returned parcel; a
        photo that was used without permission
    """,
    "hero": """
        a lighthouse keeper; a lost robot; two rival cooks; a young inventor; an old sailor; a shy dragon; a night nurse; a
        retired astronaut; a talking cat; a boy who cannot lie; a clockmaker; a violin teacher; a snowman; twin sisters; a bank
        robber; a gardener who talks to roses; a time traveller; a librarian; a taxi driver; a small ghost; a queen without a
        crown; a mathematician; a fox; a postman; a painter who lost colour; a goalkeeper; a translator of old letters; a bee; a
        detective on holiday
    """,
    "place": """
        a mountain village; a busy market; an empty train station; a small island; a space station; a library; a castle in the
        fog; a desert; a school after midnight; a ship in a storm; a bakery at dawn; the top floor of a hotel; a forest in
        autumn; a laboratory; a circus; an old cinema; a bridge; a village fair; a lighthouse; a submarine; a supermarket; a
        garden behind a wall; a courtroom; a train to nowhere
    """,
    "function": """
        reverses a string; checks whether a number is prime; counts the words in a text; finds the largest item of a list;
        merges two sorted lists; removes duplicates from a list; converts Celsius to Fahrenheit; computes the factorial of a
        number; checks whether a word is a palindrome; sums the digits of a number; finds the second largest number; groups
        words by first letter; validates an email address; flattens a nested list; reads a CSV file and adds up a column; counts
        how often each letter occurs; rotates a list by n places; generates the Fibonacci sequence; finds common elements of two
        lists; formats seconds as hours and minutes; computes the greatest common divisor of two numbers; checks whether
        brackets are balanced; converts a number to Roman numerals; finds the longest word; computes the median of a list;
        transposes a matrix; finds the shortest path in a grid; implements a queue with two stacks; searches a sorted list by
        halving; sorts a list of names by last name; generates all permutations of a list; computes compound interest; counts
        vowels; parses a date; checks whether a year is a leap year; multiplies two matrices; finds missing numbers in a list;
        encodes a text with a Caesar cipher; splits a list into chunks; computes the distance between two points; converts
        binary to decimal; draws a triangle of stars; simulates rolling two dice; finds all pairs that add up to a target;
        removes a node from a linked list; prints a binary tree level by level; merges overlapping intervals; caches the results
        of another function; finds the most frequent element; compares two version numbers
    """,
    "language": "Python; JavaScript; Java; C; SQL; Go",
    "tongue": "French; Spanish; German; Italian; Portuguese",
    "sentence": """
        The meeting was moved to Thursday because of the storm.; She left her keys on the kitchen table again.; Our new office
        has more windows than the old one.; If the bus is late, we will walk to the museum.; He has been learning to play the
        violin for two years.; The soup tastes better with a little more salt.; Please send me the report before the end of the
        day.; The children built a castle out of cardboard boxes.; Nobody expected the small team to win the final.; The library
        closes early on Sundays during the summer.; The old bridge was closed after engineers found cracks in two of its
        pillars.; Although it rained all day, the market was full of people.; My brother sold his car and bought a boat that
        does not float.; The committee will publish its findings next month.; I would have called you if my phone had not been
        empty.; The recipe calls for two eggs, a cup of flour and a pinch of patience.; Few people know that the tower leans a
        little more each year.; The teacher asked us to write about a place we would never visit.; Scientists were surprised by
        how quickly the ice melted.; The train to the coast leaves from platform nine at half past seven.; Her first novel was
        rejected eleven times before it won a prize.; If you turn left at the fountain, you will see the blue door.; The company
        plans to hire forty engineers by the end of the year.; Nobody remembers who planted the apple tree.; The concert was so
        loud that the windows of the café shook.
    """,
    "review": """
        The battery lasts two days, but the screen scratches easily.; I waited forty minutes and the food was cold.; Great
        value, fast shipping, would buy again.; It is fine, nothing special, does what it says.; The sound is wonderful and
        setup took a minute.; The instructions made no sense and a screw was missing.; My daughter loves it and takes it
        everywhere.; Good idea, poor quality, broke after a week.; The hotel was clean but the walls were thin and the
        neighbours loud.; Five stars for the staff, two for the food.; I returned it the same day.; It does everything the
        expensive one does for half the price.; The plot is slow, yet I could not stop reading.; The app crashes whenever I open
        the camera.; Delivery took three weeks and nobody answered my emails.; The best noodles in town, and they remember your
        name.; Comfortable shoes, but the soles wore out in two months.; I expected more after all the praise.
    """,
    "pair": """
        tea and coffee; cats and dogs; trains and planes; novels and films; renting and buying a home; city and country life;
        solar and wind power; emails and phone calls; running and swimming; laptops and tablets; gas and electric stoves; coffee
        shops and libraries as places to study; paper books and e-readers; democracy and monarchy; a virus and a bacterium;
        mitosis and meiosis; weather and climate; Python and Java; a list and a tuple; the heart and the lungs; comedies and
        tragedies; working from home and in an office; public and private schools; savings accounts and shares; cake and pie;
        hurricanes and tornadoes; mass and weight; frogs and toads; jazz and blues; a debit card and a credit card; butter and
        margarine
    """,
    "role": """
        a travel guide; a doctor; a history teacher; a chef; a financial adviser; a gardener; a detective; a coach; a lawyer; a
        physics professor; a pirate captain; an alien who has just landed; a sports reporter; a mayor; a philosopher; a robot
        butler; a tailor; an astronaut; a librarian; a medieval knight; a software engineer; a nurse; a film director; a
        grandmother from a small village; a judge; a magician
    """,
    "want": """
        plan a weekend on a small budget; get better at remembering names; start a herb garden; cook for twelve guests; learn to
        save money; prepare for a long hike; choose a first musical instrument; understand a confusing letter; learn to juggle;
        repair a dripping tap; write a speech for a wedding; sleep better; choose a laptop; move to another country; train a
        puppy; start a podcast; understand black holes; read more books; paint a room; become a pilot; win an argument politely;
        make friends in a new town; grow tomatoes; stop wasting time online; learn to swim; bake bread; find a first job; take
        better photos; teach a child to read; cross a desert; organise a reunion; save water
    """,
}
"""What stands for each placeholder of a template, separated by semicolons."""

TEMPLATES = (
    "Explain {topic} to {audience}.",
    "What is the most common misunderstanding about {topic}?",
    "Write {style} paragraph about {topic}.",
    "Summarise what everyone should know about {topic} in {count} sentences.",
    "Give {count} reasons to learn about {topic}.",
    "Write a quiz with {count} questions and answers about {topic}.",
    "Describe the history of {topic} in a few short paragraphs.",
    "List {count} {thing}.",
    "Give me {count} {thing}, with one sentence of explanation each.",
    "Make a table of {count} {thing} with advantages and disadvantages.",
    "Write {style} letter to {person} about {matter}.",
    "Draft {style} email to {person} about {matter}. Keep it under 120 words.",
    "Write a short story about {hero} in {place}.",
    "Write a poem about {hero} in {place}.",
    "Write the first scene of a play: {hero} arrives in {place}.",
    "Write a function in {language} that {function}.",
    "Write a function in {language} that {function}, and explain how it works.",
    "What tests would you write for a function that {function}?",
    'Translate into {tongue}: "{sentence}"',
    'Rewrite this sentence in {style} tone: "{sentence}"',
    'Make this sentence shorter without losing its meaning: "{sentence}"',
    'Put this sentence into the past, the present and the future: "{sentence}"',
    'Is this review positive, negative or neutral? Explain briefly. "{review}"',
    'Write {style} reply to this review: "{review}"',
    "Compare {pair}. What are the main differences?",
    "Which would you recommend, {pair}? Argue both sides.",
    "You are {role}. A visitor wants to {want}. What do you tell them?",
    "Act as {role} and ask me {count} questions to find out how I could {want}.",
    "Write a dialogue between {role} and someone who wants to {want}.",
    "Give me a step-by-step plan to {want}.",
    "What is {topic}?",
    "How does {topic} affect everyday life?",
    "Tell me {count} surprising facts about {topic}.",
    "Write an outline for a talk about {topic} with {count} sections.",
    "Write the introduction of an essay about {topic} for {audience}.",
    "What would {role} say about {topic}?",
    "Pretend to be {role} and explain {topic} in your own voice.",
    "Write a blog post about {topic} that ends with a question to the reader.",
    "Which {count} words should I know to talk about {topic}? Define each.",
    "Give a counterargument to the claim that {topic} no longer matters.",
    "Describe {place} so that a reader can smell and hear it.",
    "Start a story with the words: {hero} had never seen {place} before.",
    "Write a short dialogue between {hero} and {role}.",
    "Write a news report about {hero} who was found in {place}.",
    "Write a limerick about {hero}.",
    'List the verbs in this sentence and give their tense: "{sentence}"',
    'Who or what is this sentence about, and what happens? Answer as JSON with the keys subject and event. "{sentence}"',
    'Continue this text with {count} more sentences: "{sentence}"',
    'Correct the grammar where needed and explain: "{sentence}"',
    'What does the writer of this review like and dislike? Answer in two lists. "{review}"',
    "Explain the difference between {pair} to {audience}.",
    "Write pseudocode for a program that {function}.",
    "What is the time complexity of a program that {function}? Explain briefly.",
    "Here is my task: write a program in {language} that {function}. Which mistakes are likely?",
)


def instructions(count: int, random: Random) -> list[str]:
    """`count` different instructions; every template has about the same share, as far as its words reach.

    Raises:
        InvalidInputError: there are fewer.
    """
    if count == 0:
        return []
    filled = [list(_fill(template)) for template in TEMPLATES]
    most = sum(map(len, filled))
    if count > most:
        raise InvalidInputError(f"instructions is {count:,} and there are {most:,} different ones; ask for fewer")
    queues = [iter(_shuffled(items, random)) for items in filled]
    chosen: list[str] = []
    while queues and len(chosen) < count:
        for queue in list(queues):
            text = next(queue, None)
            if text is None:
                queues.remove(queue)
            elif len(chosen) < count:
                chosen.append(text)
    return chosen


def _fill(template: str) -> Iterator[str]:
    """All instructions of a template."""
    slots = [name for _, name, _, _ in Formatter().parse(template) if name]
    for words in product(*(" ".join(WORDS[slot].split()).split("; ") for slot in slots)):
        yield template.format(**dict(zip(slots, words, strict=True)))


def _shuffled(items: list[str], random: Random) -> list[str]:
    random.shuffle(items)
    return items
