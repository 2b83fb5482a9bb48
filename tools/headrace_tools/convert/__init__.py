"""From a Hugging Face checkpoint to a Headrace container."""
