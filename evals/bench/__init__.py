"""`specdec bench` and `specdec generate --compare`: speed and acceptance beside plain decoding."""
