//! The chat template of a folder, and prompts that it writes.

use std::path::Path;

use serde_json::Value;
use tessera_base::Diagnostic;
use tessera_text::{ChatMessage, ChatTemplate, ChatTokens};

use super::TextModel;

/// Files that may hold a template, in the order in which they are looked for.
const TEMPLATE_FILES: [&str; 3] = ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"];

impl TextModel {
    /// Reads the chat template of the folder.
    ///
    /// # Errors
    /// T0453 if the folder has none, or one that is not in Jinja.
    pub fn read_chat_template(&self) -> Result<ChatTemplate, Diagnostic> {
        let config = read_json(&self.dir.join(TEMPLATE_FILES[2]));
        let tokens = ChatTokens { begin: token(&config, "bos_token"), end: token(&config, "eos_token") };
        for name in TEMPLATE_FILES {
            let file = self.dir.join(name);
            let source = match name.ends_with(".jinja") {
                true => std::fs::read_to_string(&file).ok(),
                false => default_template(&read_json(&file)["chat_template"]),
            };
            if let Some(source) = source {
                return ChatTemplate::parse(&file.display().to_string(), &source, tokens);
            }
        }
        Err(ChatTemplate::report_missing(&self.dir.display().to_string(), &TEMPLATE_FILES))
    }
}

/// Returns the messages of a prompt.
#[must_use]
pub fn chat_messages(system: Option<&str>, prompt: &str) -> Vec<ChatMessage> {
    let message = |role: &str, text: &str| ChatMessage { role: role.to_string(), content: text.to_string() };
    system.map(|text| message("system", text)).into_iter().chain([message("user", prompt)]).collect()
}

/// Returns what a file of JSON holds, or null.
fn read_json(file: &Path) -> Value {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

/// Returns the text of a special token, which is a string or an object.
fn token(config: &Value, key: &str) -> Option<String> {
    let value = &config[key];
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_string)
}

/// Returns the template that a value holds: a text, or a list of named ones.
fn default_template(value: &Value) -> Option<String> {
    let named = || value.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    value.as_str().or_else(named).map(str::to_string)
}
