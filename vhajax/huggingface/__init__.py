"""Models in the layout of Hugging Face transformers: out (`export`) and in (`load`)."""
