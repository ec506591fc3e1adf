//! Parsers of argument values that flags of several sets share. Each returns a typed value, or a
//! diagnostic that shows the expected syntax. A syntax of one set stands beside its flags.

use tessera::WeightsBase;
use tessera::program_command::ProgramCommand;
use tessera_base::Diagnostic;

use crate::codes::T0030;

/// Parses milliseconds, such as `60`, and returns whole nanoseconds.
pub fn parse_milliseconds(option: &str, text: &str) -> Result<u64, Diagnostic> {
    let ms: Option<f64> = text.trim().parse().ok().filter(|ms| (0.0..=MAX_DELAY_MS).contains(ms));
    ms.map(|ms| (ms * 1e6).round() as u64).ok_or_else(|| {
        let why = format!("`{}` is not a number of milliseconds from 0 to {MAX_DELAY_MS}", text.trim());
        invalid_argument(option, text, &why, &format!("{option} 60"))
    })
}

/// Upper bound of a time that an option gives in milliseconds: ten minutes.
const MAX_DELAY_MS: f64 = 600_000.0;

/// Merges pins from several options into one list.
///
/// # Errors
/// T0030 if two options set one knob to different values.
pub fn merge_pins(parts: &[Option<String>]) -> Result<String, Diagnostic> {
    let mut merged: Vec<(&str, &str)> = Vec::new();
    for item in parts.iter().flatten().flat_map(|p| p.split(',')).map(str::trim).filter(|i| !i.is_empty()) {
        let (knob, value) = item.split_once('=').unwrap_or((item, ""));
        match merged.iter().find(|(k, _)| *k == knob) {
            Some((_, other)) if *other != value => {
                let says = format!("{knob} is given as {other} and as {value}");
                return Err(Diagnostic::error(&T0030, says).with_hint("give one value"));
            }
            Some(_) => {}
            None => merged.push((knob, value)),
        }
    }
    Ok(merged.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","))
}

/// Returns the command that runs this binary, which the rank processes run too.
pub fn current_binary() -> Result<ProgramCommand, Diagnostic> {
    let why =
        |why: String| Diagnostic::error(&T0030, format!("cannot determine the path of this binary: {why}"));
    let path = std::env::current_exe().map_err(|e| why(e.to_string()))?;
    let path = path.to_str().ok_or_else(|| why("it is not UTF-8".to_string()))?;
    Ok(ProgramCommand::from_executable(path))
}

/// Builds the T0030 diagnostic for an argument, with an example of the syntax.
pub fn invalid_argument(option: &str, text: &str, why: &str, example: &str) -> Diagnostic {
    Diagnostic::error(&T0030, format!("{option} `{text}`: {why}"))
        .with_hint(format!("write it like {example}"))
}
/// Parses the value of `--weights`.
pub fn parse_weights_base(text: &str) -> Result<WeightsBase, Diagnostic> {
    let why = "not `synthetic:` and a whole number; weight files are read from the model's folder";
    WeightsBase::parse(text).ok_or_else(|| invalid_argument("--weights", text, why, "--weights synthetic:1"))
}
