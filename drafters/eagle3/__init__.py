"""EAGLE-3: a head of few layers on the target's own features, which drafts token by token."""
