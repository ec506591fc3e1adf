//! The first GPU, for tests of this crate.

use crate::capabilities::{Capabilities, FeatureMask};
use crate::compile::Compiler;
use crate::driver::Context;
use crate::dylib::Nvrtc;
use crate::libraries::Libraries;

/// What a test needs to compile and run kernels on GPU 0.
#[derive(Debug)]
pub(crate) struct TestGpu {
    pub(crate) compiler: Compiler,
    pub(crate) capabilities: Capabilities,
    pub(crate) context: Context,
    pub(crate) libraries: Libraries,
}

/// Opens the first GPU. Returns `None`, and prints why the test is skipped, if there is no GPU.
pub(crate) fn open_test_gpu() -> Option<TestGpu> {
    let libraries = Libraries::load(&[]);
    let (Ok(_), Ok(nvrtc)) = (libraries.check_loaded(crate::Library::Driver), Nvrtc::load(&libraries)) else {
        eprintln!("skipped: no driver or no NVRTC");
        return None;
    };
    let Ok(context) = Context::open(0) else {
        eprintln!("skipped: no GPU");
        return None;
    };
    let capabilities = Capabilities::query(&context, FeatureMask::default()).unwrap();
    let compiler = Compiler::new(nvrtc, capabilities.architecture(), None).unwrap();
    Some(TestGpu { compiler, capabilities, context, libraries })
}
