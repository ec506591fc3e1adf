//! The mark of something that was judged.

use std::ops::Deref;

/// A value that the judge accepted in this process. Only this crate makes one, and it cannot be serialised or
/// changed: what comes from a file or a peer is judged again.
#[derive(Debug, Clone, PartialEq)]
pub struct Verified<T>(T);

impl<T> Verified<T> {
    pub(crate) fn mark(value: T) -> Verified<T> {
        Verified(value)
    }
}

impl<T> Deref for Verified<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
