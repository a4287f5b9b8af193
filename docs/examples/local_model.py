"""A model of your own: a GGUF file, a folder in Hugging Face's format, or a name on the hub.

    python docs/examples/local_model.py model.Q4_K_M.gguf
    python docs/examples/local_model.py path/to/folder
    python docs/examples/local_model.py Qwen/Qwen2.5-0.5B-Instruct

Any target can have n-gram lookup as its drafter, which copies from the prompt and the output.
docs/drafters.md says which drafters fit which targets.
"""

import sys

from specdec import SpecDecoder

decoder = SpecDecoder.from_pretrained(sys.argv[1], drafter="ngram")
text = "The quick brown fox jumps. The quick brown fox"
drafted = decoder.generate(text, max_tokens=24)
plain = decoder.plain().generate(text, max_tokens=24)  # the same weights, without drafts
print(drafted.text)
print("identical" if drafted.token_ids == plain.token_ids else "different")
print(f"{drafted.stats.tau:.2f} tokens per step of the target")
