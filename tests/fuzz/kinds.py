"""All kinds by their names."""

from tests.fuzz import checkpoints, grammars, records, requests

KINDS = {**checkpoints.KINDS, **grammars.KINDS, **requests.KINDS, **records.KINDS}
