//! Gives pages of a mapped file back to the operating system, which keeps the file's contents in its cache as long as it
//! has room for them.

use std::ops::Range;

use memmap2::{Mmap, UncheckedAdvice};

/// Removes the pages that hold these bytes from the memory of this process. A later read maps them again.
///
/// Reading through a descriptor would map nothing; but then each tensor needed a second way to its bytes, and a file
/// that is removed after its ranks have loaded a descriptor that stays open.
#[allow(unsafe_code)]
pub(crate) fn release_pages(map: &Mmap, bytes: Range<usize>) {
    let Some(len) = bytes.end.checked_sub(bytes.start).filter(|len| *len > 0) else { return };
    if bytes.end > map.len() {
        return;
    }
    // SAFETY: the range lies in the map. The map is private and read-only, so its pages hold the bytes of the file and no
    // change that would be lost, and the addresses stay mapped: a reference into them reads the same bytes again. That the
    // file does not change is the condition under which it was mapped.
    let released = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, len) };
    // An operating system that refuses keeps the pages, which costs memory and changes no byte.
    let _ = released;
}
