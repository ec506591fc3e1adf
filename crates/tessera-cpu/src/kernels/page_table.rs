//! Where the positions of token sequences lie in a pool of pages.

/// The pages of a batch of sequences: position p of sequence s lies in row
/// `pages[s, ⌊p / page_rows⌋] · page_rows + p mod page_rows`. Numbers arrive as floats, which hold whole numbers
/// below 2²⁴ exactly.
#[derive(Debug, Clone, Copy)]
pub struct PageTable<'a> {
    pages: &'a [f32],
    start: &'a [f32],
    page_rows: usize,
}

impl<'a> PageTable<'a> {
    /// Checks a table: `pages` holds the same number of pages for each entry of `start`, the position of the
    /// first row that a call brings.
    ///
    /// # Errors
    /// Says which number is not whole, or which page lies outside of a pool of `capacity` rows.
    pub fn new(
        pages: &'a [f32],
        start: &'a [f32],
        page_rows: usize,
        capacity: usize,
    ) -> Result<PageTable<'a>, String> {
        if start.is_empty() || page_rows == 0 || !pages.len().is_multiple_of(start.len()) {
            return Err(format!("{} pages for {} sequences", pages.len(), start.len()));
        }
        let is_whole = |x: &f32| x.fract() == 0.0 && *x < (1 << 24) as f32;
        if let Some(x) = pages.iter().chain(start).find(|x| !is_whole(x)) {
            return Err(format!("{x} is no page and no position"));
        }
        let count = capacity / page_rows;
        if let Some(page) = pages.iter().find(|p| **p >= count as f32) {
            return Err(format!("page {page} of a pool of {count} pages"));
        }
        Ok(PageTable { pages, start, page_rows })
    }

    /// Returns the number of sequences.
    #[must_use]
    pub fn sequence_count(&self) -> usize {
        self.start.len()
    }

    /// Returns the position of the first row that the call brings of a sequence; `None` if it is absent.
    #[must_use]
    pub fn first_position(&self, sequence: usize) -> Option<usize> {
        let start = self.start[sequence];
        (start >= 0.0).then_some(start as usize)
    }

    /// Returns the row of a position, or `None` if the sequence has no page for it.
    #[must_use]
    pub fn row_of(&self, sequence: usize, position: usize) -> Option<usize> {
        let per_sequence = self.pages.len() / self.start.len();
        let page = position / self.page_rows;
        let page = (page < per_sequence).then(|| self.pages[sequence * per_sequence + page])?;
        (page >= 0.0).then(|| page as usize * self.page_rows + position % self.page_rows)
    }

    /// Returns the positions to which the query at `position` attends, in ascending order: all up to its own, or
    /// with a window the first `sink` and the last `window` of them.
    pub fn attended_positions(
        position: usize,
        window: Option<usize>,
        sink: usize,
    ) -> impl Iterator<Item = usize> {
        let end = position + 1;
        let first = window.map_or(0, |w| end.saturating_sub(w));
        (0..sink.min(first)).chain(first..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_lie_in_the_pages_of_their_sequence() -> Result<(), String> {
        let (pages, start) = ([2.0, 0.0, 1.0, -1.0], [3.0, -1.0]);
        let table = PageTable::new(&pages, &start, 4, 12)?;
        assert_eq!((table.first_position(0), table.first_position(1)), (Some(3), None));
        let rows: Vec<Option<usize>> = [0, 3, 4, 7, 8].map(|p| table.row_of(0, p)).to_vec();
        assert_eq!(rows, [Some(8), Some(11), Some(0), Some(3), None]);
        assert_eq!([2, 5].map(|p| table.row_of(1, p)), [Some(6), None]);
        Ok(())
    }

    #[test]
    fn wrong_tables_are_refused() {
        for (pages, start, says) in [
            (vec![0.0, 3.0], vec![0.0], "page 3 of a pool of 3 pages"),
            (vec![0.5], vec![0.0], "0.5 is no page"),
            (vec![0.0], vec![f32::NAN], "NaN is no page"),
            (vec![0.0; 3], vec![0.0; 2], "3 pages for 2 sequences"),
            (vec![], vec![], "0 pages for 0 sequences"),
        ] {
            let why = PageTable::new(&pages, &start, 4, 12).err();
            assert!(why.as_ref().is_some_and(|w| w.contains(says)), "{why:?}");
        }
    }

    #[test]
    fn a_window_keeps_the_sink_and_the_last_positions() {
        let attended = |p, window, sink| PageTable::attended_positions(p, window, sink).collect::<Vec<_>>();
        assert_eq!(attended(3, None, 0), [0, 1, 2, 3]);
        assert_eq!(attended(5, Some(2), 0), [4, 5]);
        assert_eq!(attended(5, Some(2), 3), [0, 1, 2, 4, 5]);
        assert_eq!(attended(2, Some(2), 3), [0, 1, 2], "the sink and the window overlap");
    }
}
