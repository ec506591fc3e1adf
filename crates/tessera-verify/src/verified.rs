//! A wrapper that marks verified values.

use std::ops::Deref;

/// A value that the verifier accepted in this process. Only this crate creates one, and it can be
/// neither serialised nor changed: a value from a file or a peer is verified again.
#[derive(Debug, Clone, PartialEq)]
pub struct Verified<T>(T);

impl<T> Verified<T> {
    pub(crate) fn new(value: T) -> Verified<T> {
        Verified(value)
    }
}

impl<T> Deref for Verified<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
