//! A media pipeline that injects the armed fault: in the text embedding, or in the output folder.

use tessera_base::Diagnostic;
use tessera_runtime::drill::DrillFault;
use tessera_runtime::engine::{Delivery, MediaPipeline};
use tessera_runtime::wire::{Dtype, Tensor, Tensors};

use super::injector::FaultInjector;

/// The leader's media pipeline with an injected fault.
pub(crate) struct DrillMediaPipeline {
    inner: Box<dyn MediaPipeline>,
    injector: FaultInjector,
}

impl DrillMediaPipeline {
    pub(crate) fn new(inner: Box<dyn MediaPipeline>, injector: FaultInjector) -> DrillMediaPipeline {
        DrillMediaPipeline { inner, injector }
    }
}

impl MediaPipeline for DrillMediaPipeline {
    fn encode_prompt(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        let text = self.inner.encode_prompt(prompt)?;
        let shape = &text.manifest_entry().shape;
        if self.injector.has_fault(DrillFault::UnsupportedDtype) {
            self.injector.mark_fired();
            let values = text.data().len() / text.manifest_entry().dtype.element_bytes() as usize;
            return Tensor::new(text.name(), Dtype::I64, shape, vec![0; values * 8]);
        }
        if self.injector.has_fault(DrillFault::ShortText)
            && let [rows, columns] = shape[..]
        {
            self.injector.mark_fired();
            let row_bytes = text.data().len() / rows.max(1) as usize;
            let short = &text.data()[..text.data().len() - row_bytes];
            return Tensor::new(text.name(), text.manifest_entry().dtype, &[rows - 1, columns], short);
        }
        if self.injector.has_fault(DrillFault::MissingTensor) {
            self.injector.mark_fired();
            return Tensor::new("caption", text.manifest_entry().dtype, shape, text.data());
        }
        Ok(text)
    }

    fn encode_context(
        &mut self,
        chunk: u32,
        previous: &Tensors,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic> {
        self.inner.encode_context(chunk, previous, opens_scene)
    }

    fn deliver_chunk(
        &mut self,
        chunk: u32,
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Delivery, Diagnostic> {
        self.injector.remove_output_folder(chunk);
        self.inner.deliver_chunk(chunk, outputs, opens_scene)
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        self.inner.finish_output()
    }
}
