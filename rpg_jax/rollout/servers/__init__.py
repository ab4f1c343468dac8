"""A trainer's rollouts by HTTP servers with OpenAI's completions: vLLM's, SGLang's, or this project's own."""
