"""How users begin: openings of prompts of many kinds, which the target itself goes on with.

What a target writes from nothing is mostly what it was asked most. Openings bring in kinds that are
served, too: code, lists, rewriting, summaries, translation, questions on a text, chat, sums.
"""

from collections.abc import Sequence
from random import Random

_OPENINGS = {
    "code": (
        "Write a {language} function that",
        "Write a {language} program that",
        "Write a {language} class for",
        "Complete this {language} function:\n\n```\n",
        "Find the mistake in this {language} code:\n\n```\n",
        "Explain what this {language} code does:\n\n```\n",
        "I have this function:\n\ndef ",
        "Complete this Python function; answer with the whole function.\n\n```python\ndef ",
        "Finish this:\n\n```python\nfrom typing import List\n\n\ndef ",
        'Write a Python function with this docstring:\n\n"""',
        "This function fails for some inputs. Mend it.\n\n```python\ndef ",
        "Write tests for this {language} function:\n\n```\n",
        "How do I {verb} a {structure} in {language}?",
    ),
    "list": (
        "List {number}",
        "Give me {number} ideas for {topic}",
        "What are the steps to",
        "Make a list of all",
        "Compare {topic} and {topic} in a table",
        "Write a checklist for",
    ),
    "rewriting": (
        "Make this sentence more {tone}:\n\n",
        "Correct the mistakes in this text:\n\n",
        "Rewrite this e-mail so that it sounds {tone}:\n\nDear",
        "Say this in other words: ",
        "Turn these notes on {topic} into a paragraph:\n\n-",
        "Put this text into the past tense:\n\n",
    ),
    "summary": (
        "Give me the main points of this text about {topic}:\n\n",
        "Shorten this to {number} sentences:\n\nThe",
        "What is this article about?\n\n{topic}: ",
        "Write a headline and a summary for this report:\n\n",
    ),
    "translation": (
        "Translate this into {tongue}: ",
        "Translate this {tongue} text into English:\n\n",
        'How do I say this in {tongue}? "',
        "Here is a text about {topic}. Put it into {tongue}.\n\n",
    ),
    "document": (
        "Here is a text about {topic}, and then a question about it.\n\n",
        "Text: ",
        "These are my notes on {topic}. Answer the question at the end from them alone.\n\n1.",
        "From the manual: ",
        'I read this today: "',
        "Who, when and where? Answer from this passage.\n\n",
    ),
    "chat": (
        "Hi! ",
        "I feel",
        "Can you help me",
        "What do you think about {topic}?",
        "Why ",
        "I would like to learn",
        "My friend {name}",
        "Explain {topic} to a child.",
    ),
    "word problem": (
        "{name} has {number}",
        "{name} buys {number}",
        "A train",
        "A shop sells {number}",
        "There are {number}",
        "{name} and {name} share {number}",
        "How many",
        "Solve for x:",
    ),
    "writing": (
        "Write a letter to",
        "Write a poem about {topic}",
        "Write a short story in which {name}",
        "Write an essay about {topic}",
        "Describe",
    ),
}

WORDS = {
    "language": "Python Python Python JavaScript Java C C++ SQL Rust Go HTML Bash TypeScript R",
    "structure": "list string dictionary file table tree matrix set queue graph",
    "verb": "sort reverse copy read print split merge search count filter",
    "number": "2 3 4 5 6 7 8 10 12 15 20 24 30 36 48 60 75 100 120 250",
    "tone": "polite formal friendly short clear cheerful confident simple",
    "tongue": "French German Spanish Italian Portuguese Dutch Chinese Japanese Russian Latin",
    "topic": "history music cooking gardening football bees volcanoes money sleep robots rivers"
    " elections trains chess medicine"
    " dogs painting electricity space birds bread cities democracy dinosaurs dreams energy fashion"
    " festivals forests glass"
    " health islands jobs language marriage mathematics memory mountains oceans photography plants"
    " poetry recycling schools"
    " ships snow stars sugar theater travel vaccines water weather whales wine winter",
    "name": "Ada Ben Carla Diego Emma Farid Grace Hugo Ines Jonas Kira Leo Maya Nina Omar Paula"
    " Quentin Rosa Sven Tara",
}
"""What may stand in a prompt for a name in braces, with spaces between."""


KINDS = tuple(_OPENINGS)


def opening(random: Random, kinds: Sequence[str] = KINDS) -> tuple[str, str]:
    """A kind, and the beginning of a prompt of that kind; each of `kinds` is equally likely.

    >>> opening(Random(2), ["list", "code"])
    ('list', 'List 4')
    """
    kind = random.choice(kinds)
    text = random.choice(_OPENINGS[kind])
    for name, words in WORDS.items():
        while "{" + name + "}" in text:
            text = text.replace("{" + name + "}", random.choice(words.split()), 1)
    return kind, text
