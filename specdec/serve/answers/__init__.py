"""What clients get back: whole answers and events, and how they travel. The routes make them."""
