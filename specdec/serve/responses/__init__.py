"""OpenAI's Responses API, as a layer over chats: nothing is kept between requests."""
