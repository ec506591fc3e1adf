//! The frames of a run in its report: the clip, and a contact sheet of single frames.

use maud::{Markup, html};
use tessera_base::Bytes;

use super::layout::render_note;
use super::{MAX_INLINE_CLIP_BYTES, MAX_SHEET_FRAMES, ReportPage, SheetFrame};
use crate::markup::png_uri;

/// Renders the clip for the head of the report; `None` without a clip.
pub(super) fn render_clip(page: &ReportPage<'_>) -> Option<Markup> {
    let (r, clip) = (page.record, page.clip.filter(|c| c.bytes > 0)?);
    let prompt =
        r.chunks.first().map(|c| c.prompt.as_str()).or(r.start.prompts.first().map(|p| p.text.as_str()));
    let alt = prompt.unwrap_or("the clip");
    let still = page.frames.first().map(|f| png_uri(&f.png));
    Some(html! {
        @if let Some(apng) = clip.apng.filter(|a| a.len() <= MAX_INLINE_CLIP_BYTES) {
            picture {
                // Readers who prefer reduced motion get a still image.
                @if let Some(still) = still {
                    source media="(prefers-reduced-motion: reduce)" srcset=(still);
                }
                img src=(png_uri(apng)) width=(r.start.width) height=(r.start.height) alt=(alt);
            }
        } @else {
            @if let Some(still) = still { img src=(still) alt=(alt); }
            figcaption { "The clip is in " a href=(clip.href) { (clip.href) } " (" (Bytes(clip.bytes)) ")." }
        }
        @if let Some(prompt) = prompt.filter(|_| page.frames.is_empty()) {
            figcaption { q dir="auto" { (prompt) } }
        }
    })
}

/// Renders single frames in groups of one prompt.
pub(super) fn render_contact_sheet(page: &ReportPage<'_>) -> Markup {
    let (shown, all) = (page.frames.len().min(MAX_SHEET_FRAMES), page.frames.len());
    let chosen: Vec<&SheetFrame> = (0..shown).map(|i| &page.frames[i * all / shown]).collect();
    html! {
        @if shown < all { (render_note(format_args!("{shown} of {all}, evenly spaced."))) }
        @for group in chosen.chunk_by(|a, b| a.prompt == b.prompt) {
            p.said { q dir="auto" { (group[0].prompt) } " from chunk " (group[0].chunk) }
            div.sheet {
                @for (i, f) in group.iter().enumerate() {
                    @let is_first_of_chunk = i == 0 || group[i - 1].chunk != f.chunk;
                    figure {
                        img src=(png_uri(&f.png)) alt="";
                        figcaption {
                            "chunk " (f.chunk)
                            @if is_first_of_chunk && follows_cut(page, f.chunk) { ", after a cut" }
                        }
                    }
                }
            }
        }
    }
}

fn follows_cut(page: &ReportPage<'_>, chunk: u32) -> bool {
    page.record.chunks.iter().find(|c| c.chunk == chunk).is_some_and(|c| c.cut)
}
