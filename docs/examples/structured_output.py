"""Output that a JSON schema or a list of choices describes, with drafts as without.

    pip install -e '.[grammar]'
    python docs/examples/structured_output.py

docs/structured-output.md says what a schema may ask for.
"""

import json

from specdec import Grammar, SpecDecoder

schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
decoder = SpecDecoder.from_pretrained("embedded")

request = [{"role": "user", "content": "Describe a person as JSON."}]
person = decoder.generate(request, max_tokens=64, grammar=Grammar.json_schema(schema))
print(json.loads(person.text))

question = [{"role": "user", "content": "Is water wet?"}]
print(decoder.generate(question, grammar=Grammar.choice(["yes", "no"])).text)
