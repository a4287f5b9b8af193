"""Answers from Python: one prompt, several at once, and a stream of pieces.

    python docs/examples/generate.py

The embedded model drafts with the DFlash drafter that comes with the package.
"""

from specdec import SamplingParams, SpecDecoder

decoder = SpecDecoder.from_pretrained("embedded")

# A prompt is a text, a chat or a list of tokens.
chat = [{"role": "user", "content": "Say 'the cat sat on the mat' five times."}]
result = decoder.generate(chat, max_tokens=64)
print(result.text)
print(f"{result.stats.tau:.2f} tokens per step of the target")

# Several prompts are decoded together. A seed makes sampled output repeatable.
sampling = SamplingParams(max_tokens=16, temperature=0.7, seed=1)
for answer in decoder.generate(["Once upon a time", "The capital of France is"], sampling):
    print(repr(answer.text), answer.finish_reason)

# Pieces arrive after every step. `index` says which prompt they belong to.
for piece in decoder.stream(["One, two,", "Three, four,"], max_tokens=16):
    print(piece.index, repr(piece.text))
