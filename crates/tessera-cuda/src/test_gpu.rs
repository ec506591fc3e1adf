//! The first GPU, for tests of this crate.

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::compile::Compiler;
use crate::driver::Context;
use crate::dylib::Nvrtc;
use crate::libraries::Libraries;

/// A GPU and a compiler for it.
#[derive(Debug)]
pub(crate) struct TestGpu {
    pub(crate) compiler: Compiler,
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: i32,
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
    let attribute = |which| context.device_attribute(which).unwrap();
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    );
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    let compiler = Compiler::new(nvrtc, capability, None).unwrap();
    Some(TestGpu { compiler, capability, multiprocessors, context, libraries })
}
