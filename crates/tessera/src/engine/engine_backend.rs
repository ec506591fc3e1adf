//! How long the backend of an engine lives.

use std::ops::{Deref, DerefMut};

use tessera_device::Backend;

/// The backend of an engine, and whether it is dropped with the engine.
pub enum EngineBackend {
    /// The backend is dropped with the engine.
    Owned(Box<dyn Backend>),
    /// The backend lives until the process exits, and the operating system reclaims its resources.
    /// This suits a backend whose drop would wait for its device or for other ranks.
    Leaked(&'static mut dyn Backend),
}

impl<B: Backend + 'static> From<Box<B>> for EngineBackend {
    fn from(backend: Box<B>) -> EngineBackend {
        EngineBackend::Owned(backend)
    }
}

impl Deref for EngineBackend {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        match self {
            EngineBackend::Owned(backend) => &**backend,
            EngineBackend::Leaked(backend) => &**backend,
        }
    }
}

impl DerefMut for EngineBackend {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            EngineBackend::Owned(backend) => &mut **backend,
            EngineBackend::Leaked(backend) => &mut **backend,
        }
    }
}
