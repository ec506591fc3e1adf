//! A studio that breaks as it is told.

use tessera_base::Diagnostic;
use tessera_runtime::drill::Fault;
use tessera_runtime::engine::Studio;
use tessera_runtime::wire::{Dtype, Tensor};

use super::hand::Hand;

/// The leader's own work, with a fault in the text.
pub(super) struct DrillStudio {
    inner: Box<dyn Studio>,
    hand: Hand,
}

impl DrillStudio {
    pub(super) fn new(inner: Box<dyn Studio>, hand: Hand) -> DrillStudio {
        DrillStudio { inner, hand }
    }
}

impl Studio for DrillStudio {
    fn text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        let text = self.inner.text(prompt)?;
        let shape = &text.spec().shape;
        if self.hand.has(Fault::UnsupportedDtype) {
            self.hand.strike();
            let values = text.data().len() / text.spec().dtype.bytes() as usize;
            return Tensor::new(text.name(), Dtype::I64, shape, vec![0; values * 8]);
        }
        if self.hand.has(Fault::MissingTensor) {
            self.hand.strike();
            return Tensor::new("caption", text.spec().dtype, shape, text.data());
        }
        Ok(text)
    }

    fn context(&mut self, chunk: u32, previous: &Tensor, opens_scene: bool) -> Result<Tensor, Diagnostic> {
        self.inner.context(chunk, previous, opens_scene)
    }

    fn deliver(&mut self, chunk: u32, latents: &Tensor) -> Result<u32, Diagnostic> {
        self.inner.deliver(chunk, latents)
    }

    fn finish(&mut self) -> Result<(), Diagnostic> {
        self.inner.finish()
    }
}
