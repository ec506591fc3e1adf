//! A standalone SVG drawing of which ranks wait for which.

use crate::canvas::{
    PADDING, WIDTH, draw_elbow_arrow, draw_heading, draw_label, draw_rect, draw_text, wrap_svg,
};

/// A wait graph to draw.
#[derive(Debug, Clone, Default)]
pub struct WaitGraphDrawing {
    /// Heading, such as the cause of the hang.
    pub title: String,
    /// One line below the heading.
    pub subtitle: String,
    /// Ranks that do the same, from top to bottom.
    pub rows: Vec<WaitGraphRow>,
}

/// Ranks that do the same.
#[derive(Debug, Clone, Default)]
pub struct WaitGraphRow {
    /// Such as `ranks 0, 1, 3`.
    pub ranks: String,
    /// What they do, such as `wait in all_reduce 12 of Float [1024]`.
    pub action: String,
    /// Where, such as the group and the line of the program.
    pub details: String,
    /// Why the row is marked, such as `at fault`; empty for a row that is not.
    pub mark: &'static str,
    /// Indices of the rows for which they wait.
    pub awaited_rows: Vec<usize>,
}

/// Maximum number of rows drawn.
const MAX_ROWS: usize = 24;
const ROW_H: i32 = 78;
const GAP: i32 = 22;
/// Right edge of the boxes; arrows run to the right of it.
const BOX_RIGHT: i32 = WIDTH - 150;
/// Distance between two parallel arrows.
const ARROW_STEP: i32 = 14;
const MAX_PARALLEL_ARROWS: usize = 8;

/// Draws a wait graph as a standalone SVG: a box for each row, and an arrow from each row to the rows for
/// which it waits.
#[must_use]
pub fn draw_wait_graph(drawing: &WaitGraphDrawing) -> String {
    let mut out = String::new();
    let top = draw_heading(&mut out, &drawing.title, &drawing.subtitle);
    let shown = drawing.rows.len().min(MAX_ROWS);
    let row_y = |n: usize| top + n as i32 * (ROW_H + GAP);
    for (n, row) in drawing.rows[..shown].iter().enumerate() {
        draw_row(&mut out, row, row_y(n));
    }
    let rows = drawing.rows[..shown].iter().enumerate();
    let arrows = rows.flat_map(|(from, row)| row.awaited_rows.iter().map(move |to| (from, *to)));
    for (n, (from, to)) in arrows.filter(|(from, to)| *to < shown && from != to).enumerate() {
        let x = BOX_RIGHT + 24 + ARROW_STEP * (n % MAX_PARALLEL_ARROWS) as i32;
        // Several arrows that end at one box end at different heights.
        let height = |row: usize, third: i32| row_y(row) + third * ROW_H / 3;
        let (start, end) = (height(from, 1), height(to, 2) + (n % 3) as i32 * 6 - 6);
        draw_elbow_arrow(&mut out, &[(BOX_RIGHT, start), (x, start), (x, end), (BOX_RIGHT + 2, end)]);
    }
    let mut bottom = row_y(shown);
    if shown < drawing.rows.len() {
        let more = format!("and {} more rows", drawing.rows.len() - shown);
        draw_label(&mut out, (PADDING, bottom + 8), "s", &more, WIDTH - 2 * PADDING);
        bottom += 26;
    }
    wrap_svg(&drawing.title, bottom + PADDING - GAP, &out)
}

fn draw_row(out: &mut String, row: &WaitGraphRow, y: i32) {
    let class = if row.mark.is_empty() { "card" } else { "held" };
    draw_rect(out, class, (PADDING, y), (BOX_RIGHT - PADDING, ROW_H), 8);
    let inner = BOX_RIGHT - PADDING - 36;
    let name = if row.mark.is_empty() { "r" } else { "r x" };
    draw_label(out, (PADDING + 18, y + 25), name, &row.ranks, inner);
    draw_label(out, (PADDING + 18, y + 46), "m", &row.action, inner);
    draw_label(out, (PADDING + 18, y + 65), "c", &row.details, inner);
    let mark_width = 7 * row.mark.len() as i32;
    draw_text(out, (BOX_RIGHT - 20 - mark_width, y + 25), "x b", row.mark, None);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn row(ranks: &str, awaited_rows: &[usize]) -> WaitGraphRow {
        WaitGraphRow { ranks: ranks.into(), awaited_rows: awaited_rows.to_vec(), ..WaitGraphRow::default() }
    }

    #[test]
    fn each_wait_is_an_arrow_and_the_rank_at_fault_is_marked() {
        let mut rows = vec![row("ranks 0, 1", &[1]), row("rank 2 <b>", &[])];
        rows[1].mark = "at fault";
        let svg = draw_wait_graph(&WaitGraphDrawing { title: "t".into(), rows, ..Default::default() });
        assert_eq!(svg.matches("<path class=\"wait\"").count(), 1);
        assert_eq!(svg.matches("at fault").count(), 1);
        assert!(svg.contains("rank 2 &lt;b&gt;") && !svg.contains("<b>"));
    }

    #[test]
    fn rows_beyond_the_limit_are_counted() {
        let rows = vec![row("rank", &[29]); 30];
        let svg = draw_wait_graph(&WaitGraphDrawing { rows, ..Default::default() });
        assert!(svg.contains("and 6 more rows"));
        assert_eq!(svg.matches("<path class=\"wait\"").count(), 0, "an arrow to a row that is left out");
    }
}
