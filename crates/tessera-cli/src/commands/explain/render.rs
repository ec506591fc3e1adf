//! Renders the answers of `tessera explain` as text and as JSON.

use serde_json::{Value, json};
use tessera_base::{Code, Registry};

use super::code_area;
use super::library::{Drill, Library, Page, Rule, Symptom, strip_markup};
use super::lookup::Topic;

/// Maximum line width, in characters.
pub(super) const WIDTH: usize = 100;

/// What the renderers read.
pub(super) struct Sources<'a> {
    pub(super) library: &'a Library,
    pub(super) registry: &'a Registry,
}

impl Sources<'_> {
    /// Renders one topic as text. `full` prints the whole page of a page.
    pub(super) fn render_text(&self, topic: &Topic<'_>, full: bool) -> String {
        match topic {
            Topic::Code(code) => self.render_code(code),
            Topic::Rule(rule) => self.render_rule(rule),
            Topic::Drill(drill) => self.render_drill(drill),
            Topic::Page(page) if full => strip_markup(page.text),
            Topic::Page(page) => self.render_page(*page),
            Topic::Symptom(symptom) => self.render_symptom(symptom),
        }
    }

    /// Renders one topic as a line of JSON.
    pub(super) fn render_json(&self, topic: &Topic<'_>) -> String {
        let value = match topic {
            Topic::Code(code) => self.code_value(code),
            Topic::Rule(r) => json!({"rule": r.id, "page": r.page, "forbidden": r.forbidden, "text": r.text,
                "codes": r.codes, "drills": r.drills}),
            Topic::Drill(d) => json!({"drill": d.id, "code": d.code, "rank": d.rank, "place": d.place,
                "fault": d.fault, "rules": d.rules, "manual": d.page}),
            Topic::Page(p) => json!({"manual": p.name, "title": p.title(), "page": p.text}),
            Topic::Symptom(s) => {
                json!({"symptom": s.title, "what": s.what, "first": s.first, "codes": s.codes,
                "drills": s.drills, "manual": s.pages})
            }
        };
        value.to_string() + "\n"
    }

    /// The fields of a code in JSON.
    pub(super) fn code_value(&self, code: &Code) -> Value {
        let rules: Vec<&str> = self.library.rules_of_code(code.id).map(|r| r.id.as_str()).collect();
        let drills: Vec<&str> = self.library.drills_of_code(code.id).map(|d| d.id.as_str()).collect();
        json!({"code": code.id, "title": code.title, "area": code_area(code), "page": code.page, "rules": rules,
            "drills": drills, "manual": self.library.page_of_code(code.id)})
    }

    fn render_code(&self, code: &Code) -> String {
        let body: Vec<String> = code.page.split("\n\n").map(wrap_paragraph).collect();
        let mut out =
            format!("{}: {}\n\n{}\nRaised by: {}.\n", code.id, code.title, body.join("\n"), code_area(code));
        let rules: Vec<&str> = self.library.rules_of_code(code.id).map(|r| r.id.as_str()).collect();
        let drills: Vec<&str> = self.library.drills_of_code(code.id).map(|d| d.id.as_str()).collect();
        out += &render_names("Rules", &rules);
        out += &render_names("Drills", &drills);
        out + &render_names("Page", self.library.page_of_code(code.id).as_slice())
    }

    fn render_rule(&self, rule: &Rule) -> String {
        let kind = if rule.forbidden { "forbidden" } else { "must hold" };
        let mut out = format!("{}, {kind}, page {}\n\n{}\n", rule.id, rule.page, wrap_paragraph(&rule.text));
        out += &self.render_codes("Checked by", &rule.codes);
        out += &self.render_drills("To see it fail, run `tessera drill ID`", &rule.drills);
        out + &render_names("Page", &[&rule.page])
    }

    fn render_drill(&self, drill: &Drill) -> String {
        let end = match &drill.code {
            Some(code) => format!(
                "Expected failure: {code} ({}), {}, {}.\n",
                self.title_of(code),
                drill.rank,
                drill.place
            ),
            None => "A measurement: it passes if all of its gates pass.\n".to_string(),
        };
        let rules: Vec<&str> = drill.rules.iter().map(String::as_str).collect();
        let fault = wrap_paragraph(&format!("Drill {}: {}.", drill.id, drill.fault));
        let command = format!("Run it: tessera drill {}\n", drill.id);
        format!("{fault}\n{end}{command}")
            + &render_names("Rules", &rules)
            + &render_names("Page", &[&drill.page])
    }

    fn render_page(&self, page: Page) -> String {
        let mut out =
            format!("{} (page {})\n\n{}\n", page.title(), page.name, wrap_paragraph(&page.opening()));
        let first = page.list_items("Instrumentation");
        if !first.is_empty() {
            out += "Look first at:\n";
            out.extend(first.iter().map(|item| wrap_item(item)));
            out.push('\n');
        }
        let rules: Vec<&Rule> = self.library.rules.iter().filter(|r| r.page == page.name).collect();
        let drills: Vec<String> =
            self.library.drills.iter().filter(|d| d.page == page.name).map(|d| d.id.clone()).collect();
        let mut codes: Vec<String> = self.registry.iter().map(|c| c.id.to_string()).collect();
        codes.retain(|c| page.text.contains(c.as_str()));
        out += &self.render_codes("Codes", &codes);
        out += &self.render_drills("Drills", &drills);
        out += "Rules:\n";
        out.extend(rules.iter().map(|r| {
            let mark = if r.forbidden { "Forbidden: " } else { "" };
            wrap_item(&format!("{} {mark}{}", r.id, r.text))
        }));
        out + &format!("\n`tessera explain {} --full` prints the whole page.\n", page.name)
    }

    fn render_symptom(&self, symptom: &Symptom) -> String {
        let mut out = format!("{}\n\n{}\n", symptom.title, wrap_paragraph(&symptom.what));
        out += &wrap_paragraph(&format!("Look first at: {}", symptom.first));
        out.push('\n');
        out += &self.render_codes("Codes", &symptom.codes);
        out += &self.render_drills("Drills", &symptom.drills);
        let pages: Vec<&str> = symptom.pages.iter().map(String::as_str).collect();
        out + &render_names("Page", &pages)
    }

    fn title_of(&self, code: &str) -> &'static str {
        self.registry.get(code).map_or("", |c| c.title)
    }

    /// Renders codes with their titles, one per line; nothing if there are none.
    fn render_codes(&self, heading: &str, codes: &[String]) -> String {
        let lines: Vec<String> = codes.iter().map(|c| format!("  {c}  {}\n", self.title_of(c))).collect();
        render_lines(heading, &lines)
    }

    /// Renders drills with their faults, one per line; nothing if there are none.
    fn render_drills(&self, heading: &str, drills: &[String]) -> String {
        let width = drills.iter().map(String::len).max().unwrap_or_default();
        let line = |d: &String| format!("  {d:width$}  {}\n", self.library.fault_of(d));
        render_lines(heading, &drills.iter().map(line).collect::<Vec<_>>())
    }
}

fn render_lines(heading: &str, lines: &[String]) -> String {
    if lines.is_empty() { String::new() } else { format!("{heading}:\n{}", lines.concat()) }
}

/// Renders names on one line, wrapped; nothing if there are none.
fn render_names(heading: &str, names: &[&str]) -> String {
    if names.is_empty() { String::new() } else { wrap_paragraph(&format!("{heading}: {}", names.join(", "))) }
}

/// Wraps a paragraph into lines of at most [`WIDTH`] characters; a longer word stays whole.
pub(super) fn wrap_paragraph(paragraph: &str) -> String {
    wrap_lines(paragraph, "", "")
}

/// Wraps a list item.
fn wrap_item(item: &str) -> String {
    wrap_lines(item, "  - ", "    ")
}

fn wrap_lines(paragraph: &str, first: &str, indent: &str) -> String {
    let mut out = first.to_string();
    let (mut column, mut is_line_empty) = (first.len(), true);
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if !is_line_empty && column + 1 + width > WIDTH {
            out.push('\n');
            out += indent;
            column = indent.len();
        } else if !is_line_empty {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += width;
        is_line_empty = false;
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        let text = wrap_paragraph(&"word ".repeat(60));
        assert!(
            text.lines().all(|l| l.len() <= WIDTH && !l.ends_with(' ')) && text.lines().count() == 3,
            "{text}"
        );
        assert!(wrap_item(&"word ".repeat(60)).lines().skip(1).all(|l| l.starts_with("    word")));
    }
}
