"""Questions to `specdec serve` through the public openai client.

    specdec serve --max-num-seqs 8                 # one terminal
    pip install openai
    python docs/examples/ask_server.py             # another; or with the server's URL

docs/serve.md lists the routes and the fields beside OpenAI's.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Explain rainbows."}],
    max_tokens=24,
    temperature=0,
)
print(answer.choices[0].message.content)

stream = client.completions.create(
    model=model, prompt="Once upon a time", max_tokens=24, temperature=0, stream=True
)
for event in stream:
    print(event.choices[0].text, end="", flush=True)
print()
