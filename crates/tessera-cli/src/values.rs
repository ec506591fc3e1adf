//! Values of arguments: text to typed values, or a diagnostic that says how to write them.

use std::path::PathBuf;

use tessera::Mesh;
use tessera::modelled::ModelledStudio;
use tessera_base::{Code, Diagnostic};

/// A value that cannot be read.
pub static T0030: Code = Code {
    id: "T0030",
    title: "argument cannot be read",
    page: "A change during a stream is written CHUNK:VALUE, where CHUNK counts from 0 and the change holds from that chunk \
on: `--at 4:'a blue square moves left'`, `--seed-at 4:7`. Steps are numbers separated by commas, falling: \
`--steps 1000,750,500,250`. Modelled times are milliseconds: `--model-decode 60,120,15`. A mapping is a file in TOML. \
Quote a text that has spaces, or the shell will take it apart.",
};

/// A mesh, such as `tp=2,pp=1`.
pub fn mesh(text: &str) -> Result<Mesh, Diagnostic> {
    text.parse().map_err(|d: Box<Diagnostic>| *d)
}

/// Timesteps, such as `1000,750,500,250`.
pub fn steps(text: &str) -> Result<Vec<f64>, Diagnostic> {
    text.split(',')
        .map(|word| word.trim().parse::<f64>().map_err(|_| word))
        .collect::<Result<_, _>>()
        .map_err(|word| {
            refuse("--steps", text, &format!("`{word}` is no number"), "--steps 1000,750,500,250")
        })
}

/// A prompt that holds from a chunk on, such as `4:a blue square`.
pub fn prompt_at(text: &str) -> Result<(u32, String), Diagnostic> {
    let (chunk, prompt) = at(text, "--at", "--at 4:'a blue square moves left'")?;
    Ok((chunk, prompt.trim().to_string()))
}

/// A seed that holds from a chunk on, such as `4:7`.
pub fn seed_at(text: &str) -> Result<(u32, u64), Diagnostic> {
    let example = "--seed-at 4:7";
    let (chunk, seed) = at(text, "--seed-at", example)?;
    let seed = seed.trim().parse();
    seed.map(|s| (chunk, s))
        .map_err(|_| refuse("--seed-at", text, "the seed is no whole number from 0", example))
}

/// Weights that every rank loads before a chunk, such as `4:models/demo-2`.
pub fn weights_at(text: &str) -> Result<(u32, PathBuf), Diagnostic> {
    let example = "--weights-at 4:models/other";
    match at(text, "--weights-at", example)? {
        (_, "") => Err(refuse("--weights-at", text, "no folder after the `:`", example)),
        (chunk, folder) => Ok((chunk, PathBuf::from(folder))),
    }
}

/// Milliseconds, such as `60`, as whole nanoseconds.
pub fn milliseconds(option: &str, text: &str) -> Result<u64, Diagnostic> {
    let ms: Option<f64> = text.trim().parse().ok().filter(|ms| (0.0..=MODEL_MS_MAX).contains(ms));
    ms.map(|ms| (ms * 1e6).round() as u64).ok_or_else(|| {
        let why = format!("`{}` is no number of milliseconds from 0 to {MODEL_MS_MAX}", text.trim());
        refuse(option, text, &why, &format!("{option} 60"))
    })
}

/// Modelled times of decode and encode in nanoseconds, such as `60,120,15` in milliseconds: of a chunk's first latent,
/// of its other ones, of the anchor's encode. Without the second each of the `others` takes as long as the first;
/// without the third the encode takes what it takes.
pub fn model_decode(text: &str, others: u64) -> Result<ModelledStudio, Diagnostic> {
    let option = "--model-decode";
    let words: Vec<&str> = text.split(',').collect();
    if words.len() > 3 {
        return Err(refuse(option, text, "more than three numbers", "--model-decode 60,120,15"));
    }
    let ns: Vec<u64> = words.iter().map(|w| milliseconds(option, w)).collect::<Result<_, _>>()?;
    Ok(ModelledStudio {
        first_ns: ns[0],
        rest_ns: ns.get(1).copied().unwrap_or(others * ns[0]),
        encode_ns: ns.get(2).copied().unwrap_or(0),
    })
}

/// Longest modelled time: ten minutes.
const MODEL_MS_MAX: f64 = 600_000.0;

fn at<'a>(text: &'a str, option: &str, example: &str) -> Result<(u32, &'a str), Diagnostic> {
    let (chunk, value) =
        text.split_once(':').ok_or_else(|| refuse(option, text, "no `:` after the chunk", example))?;
    let chunk = chunk.trim();
    let number =
        chunk.parse().map_err(|_| refuse(option, text, &format!("`{chunk}` is no chunk"), example))?;
    Ok((number, value))
}

fn refuse(option: &str, text: &str, why: &str, example: &str) -> Diagnostic {
    Diagnostic::error(&T0030, format!("{option} `{text}`: {why}")).hint(format!("write it like {example}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        assert_eq!(mesh("tp=2, pp=1").unwrap().ranks(), 2);
        assert_eq!(steps("1000, 750.5").unwrap(), [1000.0, 750.5]);
        assert_eq!(prompt_at("4: a: b ").unwrap(), (4, "a: b".to_string()));
        assert_eq!(seed_at("0:18446744073709551615").unwrap(), (0, u64::MAX));
    }

    #[test]
    fn modelled_times_are_filled_in() {
        let model = |text| model_decode(text, 2).map(|m| [m.first_ns, m.rest_ns, m.encode_ns]);
        assert_eq!(model("60").unwrap(), [60_000_000, 120_000_000, 0]);
        assert_eq!(model("0.5, 7 ,1").unwrap(), [500_000, 7_000_000, 1_000_000]);
        for bad in ["", "60,", "-1", "1e9", "NaN", "1,2,3,4"] {
            assert_eq!(model(bad).unwrap_err().code, &T0030, "{bad}");
        }
    }

    #[test]
    fn refusals_say_how_to_write_it() {
        let bad = [
            prompt_at("a red circle").unwrap_err(),
            prompt_at("x:a red circle").unwrap_err(),
            prompt_at("-1:a").unwrap_err(),
            seed_at("3:-1").unwrap_err(),
            seed_at("3").unwrap_err(),
            weights_at("3:").unwrap_err(),
            weights_at("models/demo").unwrap_err(),
            steps("1000,,500").unwrap_err(),
            steps("").unwrap_err(),
        ];
        assert!(bad.iter().all(|d| d.code == &T0030 && d.hint.is_some()), "{bad:#?}");
        assert_eq!(mesh("mp=2").unwrap_err().code.id, "T0101");
    }
}
