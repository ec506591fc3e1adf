//! Chat templates: the text that a model was trained to continue, written from messages by the model's own template.
//!
//! A template is a program in Jinja. It runs with the settings and functions that transformers gives it.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde::Serialize;
use tessera_base::Diagnostic;
use time::OffsetDateTime;

use crate::codes::T0453;

/// Steps of a template after which it counts as endless.
const STEPS_MAX: u64 = 10_000_000;

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// The special tokens that templates name; empty ones are undefined there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatTokens {
    /// Text of the token that begins a text.
    pub begin: Option<String>,
    /// Text of the token that ends one.
    pub end: Option<String>,
}

/// The template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    file: String,
    environment: Environment<'static>,
    tokens: ChatTokens,
}

/// Name of the only template of an environment.
const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Reads a template. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// T0453 with the line if the template is not in Jinja.
    pub fn parse(file: &str, source: &str, tokens: ChatTokens) -> Result<ChatTemplate, Diagnostic> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(STEPS_MAX));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", write_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, source.to_string())
            .map_err(|e| describe_error(file, "is not a template", &e))?;
        Ok(ChatTemplate { file: file.to_string(), environment, tokens })
    }

    /// Returns the diagnostic of a folder that has a template in none of these files.
    #[must_use]
    pub fn report_missing(folder: &str, files: &[&str]) -> Diagnostic {
        Diagnostic::error(&T0453, "the model has no chat template")
            .with_label(folder, format!("has none in {}", files.join(", ")))
            .with_hint("leave out --chat: a base model continues the prompt itself")
    }

    /// Writes the messages as text, and the beginning of the answer. `now_s` is the time that
    /// `strftime_now` prints, in seconds since 1970, in UTC.
    ///
    /// # Errors
    /// T0453 with the line if the template refuses the messages or fails.
    pub fn render(&self, messages: &[ChatMessage], now_s: i64) -> Result<String, Diagnostic> {
        let now = OffsetDateTime::from_unix_timestamp(now_s).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let print_time = move |format: String| {
            let cannot = |e: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
            let format =
                time::format_description::parse_strftime_owned(&format).map_err(|e| cannot(e.to_string()))?;
            now.format(&format).map_err(|e| cannot(e.to_string()))
        };
        let mut context = std::collections::BTreeMap::from([
            ("messages", Value::from_serialize(messages)),
            ("add_generation_prompt", Value::from(true)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("strftime_now", Value::from_function(print_time)),
        ]);
        let tokens = [("bos_token", &self.tokens.begin), ("eos_token", &self.tokens.end)];
        context.extend(tokens.into_iter().filter_map(|(key, text)| Some((key, Value::from(text.clone()?)))));
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|e| describe_error(&self.file, "refuses the messages", &e))
    }
}

fn describe_error(file: &str, what: &str, e: &Error) -> Diagnostic {
    let place = e.line().map_or(String::new(), |line| format!(":{line}"));
    let why = e.detail().map_or_else(|| e.kind().to_string(), str::to_string);
    Diagnostic::error(&T0453, format!("the chat template {what}: {why}"))
        .with_label(format!("{file}{place}"), "this line")
        .with_hint(
            "leave out --system or --chat, or fetch the template again from the publisher of the model",
        )
}

/// Writes a value as Python's `json.dumps(value, ensure_ascii=False)`: with spaces after commas and colons. The
/// library's own filter escapes signs of HTML, and its separators have no spaces.
fn write_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width);
            let lines = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, lines))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, PythonSpaces)),
    };
    let bad = |e: String| Error::new(ErrorKind::BadSerialization, e);
    written.map_err(|e| bad(e.to_string()))?;
    // Without this mark, the template's output would be escaped.
    String::from_utf8(bytes).map(Value::from_safe_string).map_err(|e| bad(e.to_string()))
}

/// The separators of Python's `json.dumps`.
struct PythonSpaces;

impl serde_json::ser::Formatter for PythonSpaces {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
