//! A video model: the dimensions of its parts and its stream settings.

use tessera_base::Diagnostics;

use crate::umt5::Umt5Config;
use crate::{StreamConfig, WanConfig};

/// The way in which the KV cache provides context across chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextRegime {
    /// Keys and values stay cached; a clean forward after denoising rewrites the chunk's rows.
    Resident,
    /// Keys and values are recomputed from three context latents before each chunk.
    Recompute,
}

/// A video model as the two config files of its folder describe it.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoModel {
    /// Dimensions of the DiT, from the model's `config.json`.
    pub wan: WanConfig,
    /// Settings of generation: chunks, cache window, denoising steps and decoder.
    pub stream: StreamConfig,
    /// Dimensions of the UMT5 text encoder, if the stream uses one.
    pub text_encoder: Option<Umt5Config>,
}

impl VideoModel {
    /// Parses both config texts; the file names appear only in diagnostics.
    ///
    /// # Errors
    /// Returns one diagnostic per problem in either text.
    pub fn parse(config: (&str, &str), stream: (&str, &str)) -> Result<VideoModel, Diagnostics> {
        let wan = WanConfig::parse(config.0, config.1)?;
        let stream = StreamConfig::parse(stream.0, stream.1, &wan)?;
        Ok(VideoModel { wan, stream, text_encoder: None })
    }

    /// Sets the text encoder of a model whose stream uses UMT5.
    ///
    /// # Errors
    /// T0450 if the DiT does not read rows of the encoder's width.
    pub fn set_text_encoder(&mut self, file: &str, config: Umt5Config) -> Result<(), Diagnostics> {
        config.check_width(file, self.wan.text_dim)?;
        self.text_encoder = Some(config);
        Ok(())
    }

    /// Returns whether keys and values stay cached across chunks or are recomputed before each
    /// chunk.
    #[must_use]
    pub fn context_regime(&self) -> ContextRegime {
        if self.stream.recompute { ContextRegime::Recompute } else { ContextRegime::Resident }
    }

    /// Returns the rows of the input `text`: those of the prompt and, under guidance, those of the negative
    /// prompt below them.
    #[must_use]
    pub fn text_rows(&self) -> u64 {
        if self.stream.guidance.is_some() { 2 * self.wan.text_len } else { self.wan.text_len }
    }

    /// Returns the number of tokens of one latent frame.
    #[must_use]
    pub fn frame_tokens(&self) -> u64 {
        let [_, h, w] = self.stream.token_grid(&self.wan);
        h * w
    }

    /// Returns the number of tokens of one chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> u64 {
        self.stream.chunk_frames * self.frame_tokens()
    }
}
