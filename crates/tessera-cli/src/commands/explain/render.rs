//! Renders the answers of `tessera explain` as text and as JSON.

use serde_json::{Value, json};
use tessera_base::{Code, Registry};
use tessera_library::{
    Card, Claim, Drill, Explainer, Library, Page, Rule, Symptom, Topic, User, strip_markup,
};

use super::code_area;
use super::lookup::Subject;

/// Maximum line width, in characters.
pub(super) const WIDTH: usize = 100;

/// What the renderers read.
pub(super) struct Sources<'a> {
    pub(super) library: &'a Library,
    pub(super) registry: &'a Registry,
}

impl Sources<'_> {
    /// Renders one subject as text. `full` prints the whole page of a subject that has one.
    pub(super) fn render_text(&self, subject: &Subject<'_>, full: bool) -> String {
        let page = match subject {
            Subject::Page(page) => Some(*page),
            Subject::Topic(t) => Page::from_path(&t.page),
            Subject::Explainer(e) => Page::from_path(&e.page),
            Subject::Card(c) => Page::from_path(&c.page),
            _ => None,
        };
        match (subject, page) {
            (_, Some(page)) if full => strip_markup(page.text),
            (Subject::Page(page), _) => self.render_page(*page),
            (Subject::Topic(topic), Some(page)) => self.render_topic(topic, page),
            (Subject::Explainer(explainer), Some(page)) => self.render_explainer(explainer, page),
            (Subject::Card(card), _) => render_card(card),
            (Subject::Claim(card, claim), _) => render_claim(card, claim),
            (Subject::Code(code), _) => self.render_code(code),
            (Subject::Rule(rule), _) => self.render_rule(rule),
            (Subject::Drill(drill), _) => self.render_drill(drill),
            (Subject::Symptom(symptom), _) => self.render_symptom(symptom),
            // Every page that the data name is embedded, which a test of the library shows.
            (Subject::Topic(_) | Subject::Explainer(_), None) => String::new(),
        }
    }

    /// Renders one subject as a line of JSON.
    pub(super) fn render_json(&self, subject: &Subject<'_>) -> String {
        let value = match subject {
            Subject::Code(code) => self.code_value(code),
            Subject::Rule(r) => {
                json!({"rule": r.id, "page": r.page, "forbidden": r.forbidden, "text": r.text,
                "codes": r.codes, "drills": r.drills, "claims": r.claims, "topics": r.topics,
                "explainers": r.explainers})
            }
            Subject::Drill(d) => json!({"drill": d.id, "code": d.code, "rank": d.rank, "place": d.place,
                "fault": d.fault, "rules": d.rules, "manual": d.page}),
            Subject::Page(p) => json!({"manual": p.name(), "title": p.title(), "page": p.text}),
            Subject::Topic(t) => json!({"topic": t.number, "name": t.name, "title": t.title, "path": t.page,
                "rules": t.rules, "claims": t.claims}),
            Subject::Explainer(e) => json!({"explainer": e.number, "name": e.name, "title": e.title,
                "path": e.page, "topics": e.topics, "cards": e.cards, "rules": e.rules, "drills": e.drills}),
            Subject::Card(c) => json!({"card": c.name, "title": c.title, "path": c.page, "source": c.source,
                "version": c.version, "read": c.read,
                "claims": c.claims.iter().map(claim_value).collect::<Vec<_>>()}),
            Subject::Claim(card, claim) => {
                let mut value = claim_value(claim);
                value["card"] = json!(card.name);
                value
            }
            Subject::Symptom(s) => {
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
        out += &render_names("Page", self.library.page_of_code(code.id).as_slice());
        out + &self.render_reading(&rules)
    }

    fn render_rule(&self, rule: &Rule) -> String {
        let kind = if rule.forbidden { "forbidden" } else { "must hold" };
        let mut out = format!("{}, {kind}, page {}\n\n{}\n", rule.id, rule.page, wrap_paragraph(&rule.text));
        out += &self.render_codes("Checked by", &rule.codes);
        out += &self.render_drills("To see it fail, run `tessera drill ID`", &rule.drills);
        out += &render_names("Page", &[&rule.page]);
        let claims: Vec<String> = rule
            .claims
            .iter()
            .filter_map(|id| self.library.find_claim(id))
            .map(|(card, claim)| wrap_item(&format!("{} of {}: {}", claim.id, card.name, claim.text)))
            .collect();
        out += &render_lines("Why", &claims);
        out + &self.render_reading(&[&rule.id])
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
            + &self.render_reading(&rules)
    }

    fn render_page(&self, page: Page) -> String {
        let mut out =
            format!("{} (page {})\n\n{}\n", page.title(), page.name(), wrap_paragraph(&page.opening()));
        let first = page.list_items("Instrumentation");
        if !first.is_empty() {
            out += "Look first at:\n";
            out.extend(first.iter().map(|item| wrap_item(item)));
            out.push('\n');
        }
        let rules: Vec<&Rule> = self.library.rules.iter().filter(|r| r.page == page.name()).collect();
        let drills: Vec<String> =
            self.library.drills.iter().filter(|d| d.page == page.name()).map(|d| d.id.clone()).collect();
        let mut codes: Vec<String> = self.registry.iter().map(|c| c.id.to_string()).collect();
        codes.retain(|c| page.text.contains(c.as_str()));
        out += &self.render_codes("Codes", &codes);
        out += &self.render_drills("Drills", &drills);
        let rules: Vec<String> = rules.into_iter().map(render_rule_item).collect();
        out += &render_lines("Rules", &rules);
        out + &format!("\n`tessera explain {} --full` prints the whole page.\n", page.name())
    }

    fn render_symptom(&self, symptom: &Symptom) -> String {
        let mut out = format!("{}\n\n{}\n", symptom.title, wrap_paragraph(&symptom.what));
        out += &wrap_paragraph(&format!("Look first at: {}", symptom.first));
        out.push('\n');
        out += &self.render_codes("Codes", &symptom.codes);
        out += &self.render_drills("Drills", &symptom.drills);
        let pages: Vec<&str> = symptom.pages.iter().map(String::as_str).collect();
        out += &render_names("Page", &pages);
        let of_drills =
            symptom.drills.iter().filter_map(|d| self.library.find_drill(d)).flat_map(|d| &d.rules);
        let of_codes = symptom.codes.iter().flat_map(|c| self.library.rules_of_code(c)).map(|r| &r.id);
        let rules: Vec<&str> = of_drills.chain(of_codes).map(String::as_str).collect();
        out + &self.render_reading(&rules)
    }

    fn render_topic(&self, topic: &Topic, page: Page) -> String {
        if page.path.starts_with("docs/manual/") {
            return self.render_page(page);
        }
        let holds = wrap_paragraph(&page.first_paragraph("What holds"));
        let mut out = format!("{} (topic {}, {})\n\n{holds}\n", topic.title, topic.number, topic.name);
        out += &self.render_rules(&topic.rules);
        let claims = topic.claims.iter().filter_map(|id| self.library.find_claim(id));
        let claims: Vec<String> = claims
            .map(|(card, claim)| wrap_item(&format!("{} of {}: {}", claim.id, card.name, claim.text)))
            .collect();
        out += &render_lines("Sources", &claims);
        out += &format!("Page: {}\n", topic.page);
        out + &format!("\n`tessera explain {} --full` prints the whole page.\n", topic.name)
    }

    fn render_explainer(&self, explainer: &Explainer, page: Page) -> String {
        let question = wrap_paragraph(&page.first_paragraph("The question"));
        let mut out = format!(
            "{} (explainer {}, {})\n\n{question}\n",
            explainer.title, explainer.number, explainer.name
        );
        out += &self.render_rules(&explainer.rules);
        out += &self.render_drills("To see it fail, run `tessera drill ID`", &explainer.drills);
        let topics: Vec<String> = explainer
            .topics
            .iter()
            .filter_map(|n| self.library.topics.iter().find(|t| t.number == *n))
            .map(|t| format!("{} {}", t.number, t.name))
            .collect();
        out += &render_names("Topics", &topics.iter().map(String::as_str).collect::<Vec<_>>());
        out += &render_names("Cards", &explainer.cards.iter().map(String::as_str).collect::<Vec<_>>());
        out += &format!("Page: {}\n", explainer.page);
        out + &format!("\n`tessera explain {} --full` prints the whole page.\n", explainer.name)
    }

    /// Renders where to read on about some rules: explainers, topics and cards.
    fn render_reading(&self, rules: &[&str]) -> String {
        let explainers: Vec<&str> =
            self.library.explainers_of_rules(rules).iter().map(|e| e.name.as_str()).collect();
        let topics: Vec<&str> = self.library.topics_of_rules(rules).iter().map(|t| t.name.as_str()).collect();
        let claims =
            self.library.rules.iter().filter(|r| rules.contains(&r.id.as_str())).flat_map(|r| &r.claims);
        let mut cards: Vec<&str> =
            claims.filter_map(|id| self.library.find_claim(id)).map(|(card, _)| card.name.as_str()).collect();
        cards.sort_unstable();
        cards.dedup();
        render_names("Explainers", &explainers)
            + &render_names("Topics", &topics)
            + &render_names("Cards", &cards)
    }

    /// Renders rules, one per item; nothing if there are none.
    fn render_rules(&self, ids: &[String]) -> String {
        let rules = ids.iter().filter_map(|id| self.library.find_rule(id));
        render_lines("Rules", &rules.map(render_rule_item).collect::<Vec<_>>())
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
        let fault = |d: &String| self.library.find_drill(d).map_or("", |d| d.fault.as_str());
        let line = |d: &String| format!("  {d:width$}  {}\n", fault(d));
        render_lines(heading, &drills.iter().map(line).collect::<Vec<_>>())
    }
}

fn render_rule_item(rule: &Rule) -> String {
    let mark = if rule.forbidden { "Forbidden: " } else { "" };
    wrap_item(&format!("{} {mark}{}", rule.id, rule.text))
}

fn render_card(card: &Card) -> String {
    let mut out = format!("{} (card {})\n\n", card.title, card.name);
    out += &format!("Source: {}\nVersion: {}\nRead: {}\n", card.source, card.version, card.read);
    let claims = card.claims.iter().map(|c| wrap_item(&format!("{} {} At: {}", c.id, c.text, c.at)));
    out += &render_lines("Claims", &claims.collect::<Vec<_>>());
    out += &format!("Page: {}\n", card.page);
    out + &format!("\n`tessera explain {} --full` prints the whole page.\n", card.name)
}

fn render_claim(card: &Card, claim: &Claim) -> String {
    let mut out = format!("{}, card {}\n\n{}\n", claim.id, card.name, wrap_paragraph(&claim.text));
    out += &wrap_paragraph(&format!("At: {}, {}", card.source, claim.at));
    if !claim.read_again {
        out += "Nobody could read this place again, so no rule rests on it.\n";
    }
    let users: Vec<String> = claim.users.iter().map(describe_user).collect();
    out + &render_names("Used by", &users.iter().map(String::as_str).collect::<Vec<_>>())
}

fn describe_user(user: &User) -> String {
    format!("{} {}", user.kind, user.id)
}

fn claim_value(claim: &Claim) -> Value {
    let users: Vec<String> = claim.users.iter().map(describe_user).collect();
    json!({"claim": claim.id, "text": claim.text, "at": claim.at, "read_again": claim.read_again, "users": users})
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
