//! Stream settings of published models, by name: what their own servers use.

use serde_json::Value;
use tessera_base::Diagnostics;
use tessera_base::config::{ConfigReader, parse_toml};

/// The stream settings of a published model. The dimensions of the model come from its checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// Self-Forcing, of 1.3 billion parameters.
    SelfForcing,
    /// LongLive, of 1.3 billion parameters.
    LongLive,
    /// StreamDiffusionV2, which transforms an input video.
    StreamDiffusionV2,
    /// Krea Realtime 14B with the settings of its own server.
    KreaRealtime,
    /// Krea Realtime 14B with the settings of Daydream Scope.
    KreaRealtimeScope,
}

impl Preset {
    /// Every preset, in the order in which help texts list them.
    pub const ALL: [Preset; 5] = [
        Preset::SelfForcing,
        Preset::LongLive,
        Preset::StreamDiffusionV2,
        Preset::KreaRealtime,
        Preset::KreaRealtimeScope,
    ];

    /// Returns the name, as the command line and `stream.toml` spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Preset::SelfForcing => "self-forcing",
            Preset::LongLive => "longlive",
            Preset::StreamDiffusionV2 => "stream-diffusion-v2",
            Preset::KreaRealtime => "krea-realtime",
            Preset::KreaRealtimeScope => "krea-realtime-scope",
        }
    }

    /// Returns the preset with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Preset> {
        Preset::ALL.into_iter().find(|p| p.name() == name)
    }

    /// Describes the preset in one sentence, with what it leaves out.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Preset::SelfForcing => "Self-Forcing 1.3B: chunks of 3 latent frames, a resident window of 21",
            Preset::LongLive => {
                "LongLive 1.3B: chunks of 3, a resident window of 12, of which the first 3 frames stay; a new \
                 prompt recomputes the keys and values of the others"
            }
            Preset::StreamDiffusionV2 => {
                "StreamDiffusionV2 1.3B: chunks of 1, a resident window of 6, of which the first 3 frames stay \
                 and are not replaced when the scene changes; needs an input video (--video), because its first \
                 step is not pure noise"
            }
            Preset::KreaRealtime => {
                "Krea Realtime 14B as its own server runs it: chunks of 3, context recomputed, warped steps"
            }
            Preset::KreaRealtimeScope => {
                "Krea Realtime 14B as Scope runs it: as krea-realtime, without the warp"
            }
        }
    }

    /// Returns the width of the residual stream of the model for which the preset is made.
    #[must_use]
    pub fn model_dim(self) -> u64 {
        match self {
            Preset::SelfForcing | Preset::LongLive | Preset::StreamDiffusionV2 => 1536,
            Preset::KreaRealtime | Preset::KreaRealtimeScope => 5120,
        }
    }

    /// Returns the settings as text of a `stream.toml`.
    #[must_use]
    pub fn to_toml(self) -> String {
        let (cache, schedule) = match self {
            Preset::SelfForcing => {
                (RESIDENT, "steps = [1000.0, 750.0, 500.0, 250.0]\nshift = 5.0\nwarp = true")
            }
            Preset::LongLive => {
                (RESIDENT_LONGLIVE, "steps = [1000.0, 750.0, 500.0, 250.0]\nshift = 5.0\nwarp = true")
            }
            Preset::StreamDiffusionV2 => {
                (RESIDENT_STREAM_DIFFUSION, "steps = [700.0, 500.0, 400.0, 200.0]\nshift = 8.0\nwarp = false")
            }
            Preset::KreaRealtime => {
                (RECOMPUTE, "steps = [1000.0, 750.0, 500.0, 250.0, 0.0]\nshift = 5.0\nwarp = true")
            }
            Preset::KreaRealtimeScope => {
                (RECOMPUTE, "steps = [1000.0, 750.0, 500.0, 250.0, 0.0]\nshift = 5.0\nwarp = false")
            }
        };
        let input = if self == Preset::StreamDiffusionV2 { "[input]\nvideo = true\n\n" } else { "" };
        let (chunk, window) = match self {
            Preset::SelfForcing => (3, 21),
            Preset::LongLive => (3, 12),
            Preset::StreamDiffusionV2 => (1, 6),
            Preset::KreaRealtime | Preset::KreaRealtimeScope => (3, 6),
        };
        format!(
            "[video]\nwidth = 832\nheight = 480\nfps = 16.0\n\n[latent]\nstride = [4, 8, 8]\nchunk_frames = {chunk}\n\n\
             [cache]\n{cache}\nwindow_frames = {window}\n\n[schedule]\n{schedule}\nprediction = \"flow\"\n\n{input}{COMPONENTS}"
        )
    }
}

const RESIDENT: &str = "mode = \"resident\"\nbias = 1.0";
const RESIDENT_STREAM_DIFFUSION: &str = "mode = \"resident\"\nsink = 3\npositions = 50\nbias = 1.0";
const RESIDENT_LONGLIVE: &str = "mode = \"resident\"\nsink = 3\nrecache = true\nbias = 1.0";
const RECOMPUTE: &str = "mode = \"recompute\"\nbias = 0.3";

/// The text encoder and the decoder of every preset.
const COMPONENTS: &str = "[text]\nencoder = \"umt5\"\n\n[decoder]\nkind = \"wan_vae\"\n";

/// Parses `stream.toml`. Keys that it leaves out have the values of the preset: the one given, else the
/// one that the key `preset` names, if there is one.
pub(crate) fn parse_over_preset(file: &str, text: &str, given: Option<Preset>) -> Result<Value, Diagnostics> {
    let mut value = parse_toml(file, text)?;
    let named = value.as_object_mut().and_then(|table| table.remove("preset"));
    let Some(preset) = given.map_or_else(|| read_name(file, named), |preset| Ok(Some(preset)))? else {
        return Ok(value);
    };
    let mut settings = parse_toml(preset.name(), &preset.to_toml())?;
    overlay(&mut settings, value);
    Ok(settings)
}

fn read_name(file: &str, named: Option<Value>) -> Result<Option<Preset>, Diagnostics> {
    let Some(named) = named else { return Ok(None) };
    let mut reader = ConfigReader::new(file, "", serde_json::json!({ "preset": named }));
    let preset = reader.read_named("preset", &Preset::ALL, Preset::name, Preset::SelfForcing);
    let ds = reader.finish();
    if ds.is_empty() { Ok(Some(preset)) } else { Err(ds) }
}

/// Replaces values of `base` by those of `over`, table by table.
fn overlay(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                overlay(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{StreamConfig, WanConfig};

    fn wan() -> WanConfig {
        WanConfig::parse("c", r#"{"dim":1536,"ffn_dim":8960,"num_heads":12,"num_layers":30}"#).unwrap()
    }

    #[test]
    fn every_preset_is_a_legal_stream_and_one_takes_a_video() {
        for preset in Preset::ALL {
            assert_eq!(Preset::from_name(preset.name()), Some(preset));
            let parsed = StreamConfig::parse(preset.name(), &preset.to_toml(), &wan());
            match preset {
                Preset::StreamDiffusionV2 => assert!(parsed.unwrap().takes_video),
                _ => assert_eq!((parsed.as_ref().unwrap().width, parsed.unwrap().height), (832, 480)),
            }
        }
    }

    #[test]
    fn presets_keep_the_sinks_of_their_models() {
        for preset in Preset::ALL {
            let s = StreamConfig::parse(preset.name(), &preset.to_toml(), &wan()).unwrap();
            let expected = match preset {
                Preset::LongLive => (3, 0, true),
                Preset::StreamDiffusionV2 => (3, 50, false),
                Preset::SelfForcing | Preset::KreaRealtime | Preset::KreaRealtimeScope => (0, 0, false),
            };
            assert_eq!((s.sink_frames, s.positions, s.recache), expected, "{}", preset.name());
        }
        let without = "preset = \"longlive\"\n[cache]\nsink = 0\nrecache = false\n";
        let s = StreamConfig::parse("s", without, &wan()).unwrap();
        assert_eq!((s.sink_frames, s.recache, s.window_frames), (0, false, 12));
    }

    #[test]
    fn a_file_overrides_its_preset_and_the_command_line_overrides_the_files_choice() {
        let text = "preset = \"krea-realtime\"\n[video]\nwidth = 640\n[schedule]\nsteps = [1000, 500]\n";
        let own = StreamConfig::parse("s", text, &wan()).unwrap();
        assert_eq!((own.width, own.height, own.bias, own.recompute), (640, 480, 0.3, true));
        assert_eq!((own.steps.as_slice(), own.warp), (&[1000.0, 500.0][..], true));
        let given = StreamConfig::parse_over("s", text, Some(Preset::LongLive), None, &wan()).unwrap();
        assert_eq!((given.width, given.window_frames, given.recompute), (640, 12, false));
        let unknown = StreamConfig::parse("s", "preset = \"krea\"\n", &wan()).unwrap_err();
        assert_eq!((unknown.len(), unknown[0].code.id), (1, "T0004"), "{unknown:#?}");
        assert!(unknown[0].message.contains("krea-realtime-scope"));
    }
}
