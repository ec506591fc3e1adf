//! The pages of the KV caches, and which sequence has which.

/// The free pages of a pool.
#[derive(Debug)]
pub(super) struct PagePool {
    free: Vec<u32>,
    page_rows: usize,
}

impl PagePool {
    /// Begins with all pages free.
    pub(super) fn new(pages: u64, page_rows: u64) -> PagePool {
        // Pages are taken from the end, so the lowest come first.
        PagePool { free: (0..pages as u32).rev().collect(), page_rows: page_rows as usize }
    }

    /// Extends the pages of a sequence so that it can hold this many positions. Returns `false`, and takes
    /// nothing, if too few pages are free.
    pub(super) fn allocate(&mut self, pages: &mut Vec<u32>, positions: usize) -> bool {
        let missing = positions.div_ceil(self.page_rows).saturating_sub(pages.len());
        if missing > self.free.len() {
            return false;
        }
        pages.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Returns the pages of a sequence that has ended.
    pub(super) fn return_pages(&mut self, pages: &mut Vec<u32>) {
        self.free.extend(pages.drain(..).rev());
    }

    #[cfg(test)]
    fn free_count(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_as_positions_need_them_and_come_back() {
        let mut pool = PagePool::new(4, 16);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.allocate(&mut a, 1) && pool.allocate(&mut b, 17));
        assert_eq!((&a[..], &b[..]), (&[0][..], &[1, 2][..]));
        assert!(pool.allocate(&mut a, 16), "the first page has 16 positions");
        assert_eq!(a, [0]);
        assert!(!pool.allocate(&mut a, 50), "only one page is free");
        assert_eq!((a.len(), pool.free_count()), (1, 1));
        pool.return_pages(&mut b);
        assert!(b.is_empty() && pool.allocate(&mut a, 50));
        assert_eq!((a, pool.free_count()), (vec![0, 1, 2, 3], 0));
    }
}
