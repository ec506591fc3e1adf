//! Parts that the report of a run and the report of an estimate share: the document, sections,
//! tables, headline numbers, meters and timelines.

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};

use crate::markup::replace_control_chars;
use crate::svg::{self, Palette};
use crate::timeline::{TimeWindow, Timeline, phase_kind};

/// One of the few numbers that the report shows first and largest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeadlineNumber {
    /// The value, such as `12.4`.
    pub value: String,
    /// The unit, such as `ms`.
    pub unit: String,
    /// What the number measures, such as `per chunk (period)`.
    pub label: String,
}

const STYLE: &str = include_str!("../report.css");

/// Colour classes of a meter: the usual one, and the one of a value above its limit.
const NORMAL_COLOUR: usize = 1;
const EXCESS_COLOUR: usize = 4;

/// Renders the document of a report. `title` is the text of the browser tab before the name of the program.
pub(super) fn render_document(title: &str, header: &Markup, body: &Markup, footer: &Markup) -> String {
    let main = html! { header { (header) } (body) footer { (footer) } };
    render_html_page(&format!("{title} · Tessera"), "", &main)
}

/// Renders an HTML page in the style of the reports: the text of the browser tab, rules that follow the
/// common style sheet, and the contents. It loads nothing.
#[must_use]
pub fn render_html_page(title: &str, extra_style: &str, main: &Markup) -> String {
    let document = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(extra_style)) }
            }
            body { main { (main) } }
        }
    };
    replace_control_chars(document.into_string())
}

/// Renders the kind of report and the name of its subject, for the top of the page.
pub(super) fn render_title(kind: impl Render, name: &str) -> Markup {
    html! {
        p.brow {
            // A mosaic of four tiles, one of them paler.
            svg viewBox="0 0 16 16" aria-hidden="true" {
                path d="M0 0h7v7H0zM9 0h7v7H9zM0 9h7v7H0z" {}
                path opacity=".4" d="M9 9h7v7H9z" {}
            }
            span { (kind) }
        }
        h1 { (name) }
    }
}

/// Renders a sentence after a coloured word; `class` is `good`, `warn` or `bad`.
pub(super) fn render_verdict(class: &str, word: impl Render, sentence: &str) -> Markup {
    html! { p class={ "verdict " (class) } { span { b class=(class) { (word) } " " (sentence) } } }
}

pub(super) fn render_section(heading: &str, body: &Markup) -> Markup {
    html! { section { h2 { (heading) } (body) } }
}

/// Renders a section on a list of items; renders nothing for an empty list.
pub(super) fn render_list_section<T>(
    heading: &str,
    items: &[T],
    render: impl FnOnce(&[T]) -> Markup,
) -> Markup {
    if items.is_empty() { Markup::default() } else { render_section(heading, &render(items)) }
}

pub(super) fn render_note(words: impl Render) -> Markup {
    html! { p.note { (words) } }
}

/// Renders a table that scrolls on narrow pages. `heads` are the cells of its heading, which is left
/// out if there are none.
pub(super) fn render_table(heads: &Markup, rows: &Markup) -> Markup {
    html! {
        div.scroll {
            table {
                @if !heads.0.is_empty() { thead { tr { (heads) } } }
                tbody { (rows) }
            }
        }
    }
}

/// Renders the numbers at the top of a page, beside the figure if there is one.
pub(super) fn render_hero(figure: Option<&Markup>, numbers: &[HeadlineNumber]) -> Markup {
    html! {
        div class=(if figure.is_some() { "hero" } else { "hero solo" }) {
            @if let Some(figure) = figure { figure { (figure) } }
            dl.numbers {
                @for n in numbers {
                    div {
                        dt { (n.label) }
                        dd { (n.value) @if !n.unit.is_empty() { small { (n.unit) } } }
                    }
                }
            }
        }
    }
}

/// Renders a list of names and values; `is_mono` selects a fixed-width font for a value.
pub(super) fn render_facts<'a>(facts: impl IntoIterator<Item = (&'a str, &'a str, bool)>) -> Markup {
    html! {
        dl.facts {
            @for (name, value, is_mono) in facts {
                div { dt { (name) } dd class=[is_mono.then_some("mono")] { (value) } }
            }
        }
    }
}

/// Renders the command that reproduces a page.
pub(super) fn render_command(command: &str) -> Markup {
    html! { pre.run { (command) } }
}

pub(super) fn render_collapsed_text(summary: impl Render, text: &str) -> Markup {
    html! { details { summary { (summary) } pre { (text) } } }
}

/// Renders a square in a colour class of the style sheet.
pub(super) fn render_dot(colour: usize) -> Markup {
    html! { i class={ "dot b" (colour) } {} }
}

/// Renders a bar that is filled to `percent`.
pub(super) fn render_meter(colour: usize, percent: f64) -> Markup {
    html! {
        span.meter { i class={ "b" (colour) } style={ "width:" (format_args!("{percent:.1}")) "%" } {} }
    }
}

/// Renders a meter of a part of a capacity, which may be exceeded.
pub(super) fn render_capacity_meter(percent: f64) -> Markup {
    let colour = if percent > 100.0 { EXCESS_COLOUR } else { NORMAL_COLOUR };
    render_meter(colour, percent.min(100.0))
}

/// Renders a share of a whole as a number and a meter.
pub(super) fn render_share(colour: usize, percent: f64) -> Markup {
    html! {
        @if percent > 0.0 && percent < 0.5 { "< 1" } @else { (format_args!("{percent:.0}")) }
        " %" (render_meter(colour, percent))
    }
}

/// Renders a window of a timeline with its legend.
pub(super) fn render_timeline(t: &Timeline, window: TimeWindow) -> Markup {
    let palette = Palette::new(t);
    let is_shown = |kind: &str| t.spans.iter().any(|s| s.is_inside(window) && phase_kind(&s.name) == kind);
    html! {
        (palette.render_legend(is_shown))
        (svg::draw_lanes(t, window, &palette))
        @if t.ranks.len() > svg::MAX_RANKS {
            (render_note(format_args!("{} more ranks are in the trace.", t.ranks.len() - svg::MAX_RANKS)))
        }
    }
}
