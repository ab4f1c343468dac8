"""A trainer's rollouts by servers with OpenAI's completions: vLLM's, SGLang's, or this project's own."""
