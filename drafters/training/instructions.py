"""General instructions of our own: templates times subjects, so that a drafter sees more than the questions of one dataset."""

from collections.abc import Iterator
from itertools import product
from random import Random
from string import Formatter

from specdec.errors import InvalidInputError

WORDS = {
    "topic": """
        photosynthesis; the water cycle; black holes; supply and demand; the French Revolution; machine learning;
        vaccines; earthquakes; the immune system; plate tectonics; inflation; the printing press; renewable energy;
        ocean currents; the human heart; gravity; the Silk Road; coral reefs; electric cars; the moon's phases;
        volcanoes; recycling; the digestive system; sleep; bees and pollination; blockchain; the Roman Empire; compound
        interest; tides; DNA; rainbows; antibiotics; urban planning; jazz music; chess openings; the stock market; tree
        rings; the speed of light; public transport; bread making; satellites; migration of birds; the alphabet; steam
        engines; the carbon cycle; batteries; democracy; magnetism; memory; glaciers
    """,
    "audience": "a ten-year-old; a high school student; a new employee; my grandmother; an expert in another field",
    "style": "a friendly; a formal; a humorous; a brief; a persuasive",
    "count": "three; five; seven; ten",
    "thing": """
        ways to save water at home; healthy breakfast ideas; tips for a job interview; games for a rainy day; reasons to
        learn a second language; questions to ask a landlord; habits of good readers; uses for old jars; steps to plan a
        birthday party; ways to stay focused; gifts for a teacher; mistakes beginners make when running; things to pack
        for a camping trip; easy vegetables to grow; ideas for a science fair; ways to thank a colleague; rules for a
        shared kitchen; activities for a long train ride; signs that a bicycle needs repair; names for a small bakery
    """,
    "person": "my landlord; a customer; my manager; a neighbour; the city council; a former teacher; a hotel; a friend",
    "matter": """
        a broken heater; a delayed delivery; a day off next Friday; noise at night; a lost umbrella; a wrong bill; a
        recommendation letter; changing an appointment; an apology for being late; an invitation to dinner
    """,
    "hero": """
        a lighthouse keeper; a lost robot; two rival cooks; a young inventor; an old sailor; a shy dragon; a night nurse
    """,
    "place": "a mountain village; a busy market; an empty train station; a small island; a space station; a library",
    "function": """
        reverses a string; checks whether a number is prime; counts the words in a text; finds the largest item of a
        list; merges two sorted lists; removes duplicates from a list; converts Celsius to Fahrenheit; computes the
        factorial of a number; checks whether a word is a palindrome; sums the digits of a number; finds the second
        largest number; groups words by first letter; validates an email address; flattens a nested list; reads a CSV
        file and adds up a column; counts how often each letter occurs; rotates a list by n places; generates the
        Fibonacci sequence; finds common elements of two lists; formats seconds as hours and minutes
    """,
    "language": "Python; JavaScript; Java; C; SQL; Go",
    "tongue": "French; Spanish; German; Italian; Portuguese",
    "sentence": """
        The meeting was moved to Thursday because of the storm.; She left her keys on the kitchen table again.; Our new
        office has more windows than the old one.; If the bus is late, we will walk to the museum.; He has been learning
        to play the violin for two years.; The soup tastes better with a little more salt.; Please send me the report
        before the end of the day.; The children built a castle out of cardboard boxes.; Nobody expected the small team
        to win the final.; The library closes early on Sundays during the summer.
    """,
    "review": """
        The battery lasts two days, but the screen scratches easily.; I waited forty minutes and the food was cold.;
        Great value, fast shipping, would buy again.; It is fine, nothing special, does what it says.; The sound is
        wonderful and setup took a minute.; The instructions made no sense and a screw was missing.; My daughter loves
        it and takes it everywhere.; Good idea, poor quality, broke after a week.
    """,
    "pair": """
        tea and coffee; cats and dogs; trains and planes; novels and films; renting and buying a home; city and country
        life; solar and wind power; emails and phone calls; running and swimming; laptops and tablets; gas and electric
        stoves
    """,
    "role": "a travel guide; a doctor; a history teacher; a chef; a financial adviser; a gardener; a detective; a coach",
    "want": """
        plan a weekend on a small budget; get better at remembering names; start a herb garden; cook for twelve guests;
        learn to save money; prepare for a long hike; choose a first musical instrument; understand a confusing letter
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
