"""The request bodies of the OpenAI API, with vLLM's extra fields.

Numbers are strict: `true` and `"1"` are none, NaN and infinity are refused. A field that we do not know is refused;
one that we know but have not built is accepted only with a value that asks for nothing. `null` means absent.
"""
