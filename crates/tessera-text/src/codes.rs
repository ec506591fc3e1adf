//! The diagnostic codes of this crate.

tessera_base::codes! {
    T0451: "tokenizer file cannot be used",
    "A UMT5 text encoder reads the ids of its own tokenizer, from the folder `tokenizer` of the model: tokenizer.json, the \
format of the library tokenizers, or spiece.model, the format of SentencePiece. If both exist, tokenizer.json is used, as in \
the reference pipelines. The file is damaged, of another kind (BPE, a Git LFS pointer, a login page), or its ids do not fit: \
the end of a prompt must have id 1, and no id may lie outside of the encoder's vocabulary.\n\n\
Fetch the folder `tokenizer` again from the publisher of the model, and compare its hash.";

    T0452: "tokenizer of a language model cannot be used",
    "A language model reads and writes the ids of its own tokenizer.json, the format of the library tokenizers. The file is damaged or \
of another kind (a Git LFS pointer, a login page), or it has ids for which the model's embedding has no row.\n\n\
Fetch tokenizer.json again from the publisher of the model.";

    T0453: "chat template cannot be used",
    "With `--chat`, the folder's own template writes the prompt as the message of a user: chat_template.jinja, chat_template.json, or \
`chat_template` in tokenizer_config.json, in this order. The folder has none, the template is not one in the language Jinja, or it \
refused the messages by `raise_exception`, for example because the model knows no system message. The message names the line.\n\n\
A base model has no template: give it `--prompt` without `--chat`. If a template refuses `--system`, write its text into the prompt.";
}
