//! `tessera.runtime.stream`: the frames of a video, chunk by chunk, while the ranks compute the next ones.

use std::path::PathBuf;
use std::sync::Arc;

use numpy::ndarray::Array4;
use numpy::{IntoPyArray, PyArray4};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tessera::files::RunFolder;
use tessera::plan::plan_model;
use tessera::stream::{LiveChunk, LiveStream};
use tessera::stream_options::{DEFAULT_PROMPT, OutputOptions, RunDevice, StreamOptions};
use tessera::{LoraFile, Mapping, Mesh, Model, Overrides, Plan, WeightChange};
use tessera_base::Diagnostics;
use tessera_estimate::{choose_media, usual_machine};

use crate::errors::OrRaise;
use crate::session::{parse_device, rank_command};
use crate::waiting::{LiveRun, abandon, wait_for, wait_on};

/// The frames of one chunk.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct VideoChunk {
    /// Index of the chunk, from 0.
    #[pyo3(get)]
    index: u32,
    /// Bytes of RGB [frames, height, width, 3].
    #[pyo3(get)]
    frames: Py<PyArray4<u8>>,
}

/// A running stream.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct VideoStream {
    live: LiveStream,
}

/// Starts a stream of a model.
#[pyfunction]
#[pyo3(signature = (
    model_folder, *, prompt=None, seed=None, chunks=None, mesh="tp=1", device="cpu", out=None, oversubscribe=false
))]
#[allow(clippy::too_many_arguments, reason = "they are the keywords of a Python function")]
pub(crate) fn stream(
    py: Python<'_>,
    model_folder: PathBuf,
    prompt: Option<String>,
    seed: Option<u64>,
    chunks: Option<u32>,
    mesh: &str,
    device: &str,
    out: Option<PathBuf>,
    oversubscribe: bool,
) -> PyResult<VideoStream> {
    let device = parse_device(device)?;
    let mapping = Mapping { mesh: mesh.parse::<Mesh>().or_raise(py)?, ..Mapping::default() };
    let options = StreamOptions {
        // A stream without a length runs until it is closed.
        chunks: chunks.unwrap_or(u32::MAX),
        prompt: prompt.unwrap_or_else(|| DEFAULT_PROMPT.to_string()),
        seed: seed.unwrap_or(0),
        // A clip would grow in a folder that nobody looks into.
        outputs: OutputOptions { no_clip: out.is_none(), ..OutputOptions::default() },
        oversubscribe,
        device,
        ..StreamOptions::default()
    };
    let argv = rank_command(py)?;
    let start = move || {
        let (model, plan) = plan_stream(&model_folder, mapping, device)?;
        let folder = RunFolder::new(out.as_deref(), "tessera-stream").map_err(|d| vec![d])?;
        LiveStream::start(Arc::new(plan), model, options, argv, folder)
    };
    let live = wait_for(py, start, || ())?.or_raise(py)?;
    Ok(VideoStream { live })
}

/// Plans a model as the command line does: where the phases of pixels run follows from their estimated period.
fn plan_stream(
    model_folder: &std::path::Path,
    mut mapping: Mapping,
    device: RunDevice,
) -> Result<(Model, Plan), Diagnostics> {
    let model = Model::open(model_folder, &Overrides::default())?;
    if mapping.check_consistency().is_empty() {
        let machine = usual_machine(&mapping, device == RunDevice::Cuda)?;
        if let Some(decision) = choose_media(&model, &mapping, &machine)? {
            mapping.media = decision.best;
        }
    }
    let plan = plan_model(&model.video, &model.name, &model_folder.display().to_string(), &mapping)?;
    Ok((model, plan))
}

#[pymethods]
impl VideoStream {
    fn __iter__(this: Py<VideoStream>) -> Py<VideoStream> {
        this
    }

    /// Waits for the next chunk.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<VideoChunk>> {
        match wait_on(py, &self.live, || self.live.next_chunk())? {
            None => Ok(None),
            Some(chunk) => to_python(py, chunk).map(Some),
        }
    }

    /// Replaces the prompt from the next requested chunk on. Returns the number of the change.
    fn send(&self, py: Python<'_>, prompt: &str) -> PyResult<u64> {
        py.detach(|| self.live.control().set_prompt(prompt)).or_raise(py)
    }

    /// Replaces the seed from the next requested chunk on. Returns the number of the change.
    fn reseed(&self, py: Python<'_>, seed: u64) -> PyResult<u64> {
        py.detach(|| self.live.control().set_seed(seed)).or_raise(py)
    }

    /// Replaces the list of denoise steps from the next requested chunk on. Returns the number of the change.
    fn choose_steps(&self, py: Python<'_>, name: &str) -> PyResult<u64> {
        py.detach(|| self.live.control().set_step_list(name)).or_raise(py)
    }

    /// Replaces the attention bias of the context from the next requested chunk on. Returns the number of the change.
    fn set_bias(&self, py: Python<'_>, bias: f32) -> PyResult<u64> {
        py.detach(|| self.live.control().set_bias(bias)).or_raise(py)
    }

    /// Replaces the LoRA before the next requested chunk, which opens a scene. Returns the number of the change.
    #[pyo3(signature = (path, *, strength=1.0))]
    fn set_lora(&self, py: Python<'_>, path: Option<PathBuf>, strength: f32) -> PyResult<u64> {
        let loras = path.map(|path| LoraFile { path, strength }).into_iter().collect();
        py.detach(|| self.live.control().set_weights(&WeightChange::Loras(loras))).or_raise(py)
    }

    /// Cuts the scene before the next requested chunk. Returns the number of the change.
    fn cut(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.live.control().cut()).or_raise(py)
    }

    /// The first chunk with a change, once the leader has taken it.
    fn chunk_of(&self, py: Python<'_>, change: u64) -> Option<u32> {
        py.detach(|| self.live.control().chunk_of(change))
    }

    /// Process ids of the ranks, in rank order.
    #[getter]
    fn process_ids(&self) -> Vec<u32> {
        self.live.process_ids()
    }

    /// Ends the stream after the chunks that are under way, and waits for its processes.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait_on(py, &self.live, || self.live.close())
    }

    fn __enter__(this: Py<VideoStream>) -> Py<VideoStream> {
        this
    }

    #[pyo3(signature = (kind=None, _value=None, _traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _value: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if kind.is_some() {
            // The exception that leaves the context says what went wrong.
            abandon(py, &self.live);
            return Ok(());
        }
        self.close(py)
    }
}

impl Drop for VideoStream {
    fn drop(&mut self) {
        // Without an interpreter the process is about to end, and its ranks end with it.
        let _ = Python::try_attach(|py| abandon(py, &self.live));
    }
}

impl LiveRun for LiveStream {
    fn kill(&self) {
        LiveStream::kill(self);
    }

    fn close(&self) -> Result<(), Diagnostics> {
        LiveStream::close(self)
    }
}

/// Turns a chunk into an object whose array owns the frames.
fn to_python(py: Python<'_>, chunk: LiveChunk) -> PyResult<VideoChunk> {
    let LiveChunk { progress, shape: [frames, height, width], rgb } = chunk;
    let array = Array4::from_shape_vec((frames, height, width, 3), rgb)
        .map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(VideoChunk { index: progress.chunk, frames: array.into_pyarray(py).unbind() })
}
