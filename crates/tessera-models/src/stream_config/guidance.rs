//! The settings of classifier-free guidance.

use tessera_base::Diagnostic;
use tessera_base::config::{ConfigReader, quote_toml};

use super::StreamConfig;
use crate::codes::T0411;

/// Maximum scale. Published scales lie between 1 and 15, so a larger one is a typo.
const SCALE_MAX: f64 = 1000.0;

/// Classifier-free guidance: every forward runs a second time with a negative prompt, and the
/// prediction moves away from the one with that prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Guidance {
    /// Factor of the difference between the two predictions. 1 gives the prediction with the prompt.
    pub scale: f64,
    /// The negative prompt. An empty one is the model without a prompt.
    pub negative_prompt: String,
}

impl Guidance {
    /// Reads the table `[guidance]`.
    pub(super) fn read(table: &mut ConfigReader<'_>) -> Guidance {
        Guidance {
            scale: table.read_number("scale", None),
            negative_prompt: table.read_text("negative_prompt", Some("")),
        }
    }

    /// Renders the table, with an empty line behind it.
    pub(super) fn to_toml(&self) -> String {
        let prompt = quote_toml(&self.negative_prompt);
        format!("[guidance]\nscale = {:?}\nnegative_prompt = {prompt}\n\n", self.scale)
    }

    /// Rejects a scale that is no number above 0.
    pub(super) fn find_problem(&self, file: &str) -> Option<Diagnostic> {
        let is_legal = self.scale > 0.0 && self.scale <= SCALE_MAX;
        (!is_legal).then(|| {
            let message = format!("guidance.scale {} must be above 0 and at most {SCALE_MAX}", self.scale);
            Diagnostic::error(&T0411, message)
                .with_label(file, "the scale of guidance")
                .with_hint("models without distillation use 3 to 7; a distilled model needs no guidance")
        })
    }
}

impl StreamConfig {
    /// Overrides the guidance: its scale, its negative prompt, or both. A scale alone keeps the
    /// negative prompt of the settings, or adds an empty one.
    ///
    /// # Errors
    /// T0411 for a negative prompt without a scale.
    pub fn set_guidance(&mut self, scale: Option<f64>, negative: Option<&str>) -> Result<(), Diagnostic> {
        if let Some(scale) = scale {
            let guidance = self.guidance.take().unwrap_or(Guidance { scale, negative_prompt: String::new() });
            self.guidance = Some(Guidance { scale, ..guidance });
        }
        match (&mut self.guidance, negative) {
            (Some(guidance), Some(negative)) => guidance.negative_prompt = negative.to_string(),
            (None, Some(negative)) => {
                return Err(Diagnostic::error(&T0411, "a negative prompt without guidance has no effect")
                    .with_label("command line", format!("the negative prompt `{negative}`"))
                    .with_label("settings of the stream", "no table [guidance]")
                    .with_hint("add --guidance SCALE, for example 5"));
            }
            (_, None) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WanConfig;

    fn parse(guidance: &str) -> Result<StreamConfig, Vec<(&'static str, String)>> {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let text = format!("[video]\nwidth = 16\nheight = 16\n{guidance}");
        let stream = StreamConfig::parse("s", &text, &wan);
        stream.map_err(|ds| ds.into_iter().map(|d| (d.code.id, d.message)).collect())
    }

    #[test]
    fn guidance_is_off_unless_the_table_exists_and_round_trips() {
        assert!(parse("").unwrap().guidance.is_none());
        assert!(!parse("").unwrap().to_toml().contains("guidance"));
        let s = parse("[guidance]\nscale = 5.5\nnegative_prompt = \"a \\\"blurry\\\" 画面\"\n").unwrap();
        let expected = Guidance { scale: 5.5, negative_prompt: "a \"blurry\" 画面".into() };
        assert_eq!(s.guidance.as_ref(), Some(&expected));
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        assert_eq!(StreamConfig::parse("t", &s.to_toml(), &wan).unwrap(), s);
        let unconditional = parse("[guidance]\nscale = 3\n").unwrap().guidance.unwrap();
        assert_eq!((unconditional.scale, unconditional.negative_prompt.as_str()), (3.0, ""));
    }

    #[test]
    fn wrong_guidance_is_refused_with_its_key() {
        for (table, id, says) in [
            ("scale = 0", "T0411", "guidance.scale 0 must be above 0"),
            ("scale = -3.5", "T0411", "guidance.scale -3.5"),
            ("scale = 1000.5", "T0411", "at most 1000"),
            ("scale = nan", "T0004", "`guidance.scale` must be a number"),
            ("negative_prompt = \"blurry\"", "T0003", "`guidance.scale` is missing"),
            ("scale = 3\nnegative = \"blurry\"", "T0002", "unknown key `guidance.negative`"),
        ] {
            let found = parse(&format!("[guidance]\n{table}\n")).unwrap_err();
            assert_eq!(found.len(), 1, "{table}: {found:?}");
            assert!(found[0].0 == id && found[0].1.contains(says), "{table}: {found:?}");
        }
    }

    #[test]
    fn each_override_keeps_the_other_setting() {
        let mut s = parse("[guidance]\nscale = 3\nnegative_prompt = \"blurry\"\n").unwrap();
        s.set_guidance(Some(6.0), None).unwrap();
        assert_eq!(s.guidance, Some(Guidance { scale: 6.0, negative_prompt: "blurry".into() }));
        s.set_guidance(None, Some("dark")).unwrap();
        assert_eq!(s.guidance, Some(Guidance { scale: 6.0, negative_prompt: "dark".into() }));
        let mut plain = parse("").unwrap();
        let refused = plain.set_guidance(None, Some("dark")).unwrap_err();
        assert!(refused.code.id == "T0411" && refused.hint.is_some_and(|h| h.contains("--guidance")));
        plain.set_guidance(Some(f64::NAN), None).unwrap();
        assert!(plain.guidance.unwrap().find_problem("s").is_some());
    }
}
