//! The lists of denoising steps of a stream: its own, and those to which a running stream may change.

use tessera_base::config::quote_toml;

use super::{PredictionTarget, StreamConfig};
use crate::schedule::{SigmaStep, compute_sigma_steps};

/// Name by which a change returns to `schedule.steps`.
pub const DEFAULT_STEP_LIST: &str = "default";
/// Maximum lists beside `schedule.steps`: each of them multiplies the calls that a plan lists.
const LISTS_MAX: usize = 8;
/// Maximum bytes of a name.
const NAME_BYTES_MAX: usize = 32;
/// Maximum denoising steps of a chunk.
const STEPS_MAX: usize = 100;

/// Computes the denoising steps of a stream from `schedule.steps`.
#[must_use]
pub fn denoising_steps(config: &StreamConfig) -> Vec<SigmaStep> {
    config.compute_steps(&config.steps)
}

impl StreamConfig {
    /// Sets the denoising timesteps, without a final 0 if the model predicts the flow.
    ///
    /// Schedules that end with 0 are common in published servers. A model that predicts x0 would
    /// run there and change the result, so [`Self::find_contradictions`] rejects its 0.
    pub fn set_steps(&mut self, steps: Vec<f64>) {
        self.steps = steps;
        self.drop_final_zeros();
    }

    /// Returns every list of denoising steps with its name: `schedule.steps` first, then the others in order of name. A
    /// change states the index of its list in this order.
    #[must_use]
    pub fn all_step_lists(&self) -> Vec<(&str, Vec<SigmaStep>)> {
        let own = (DEFAULT_STEP_LIST, self.compute_steps(&self.steps));
        let others = self.step_lists.iter().map(|(name, steps)| (name.as_str(), self.compute_steps(steps)));
        std::iter::once(own).chain(others).collect()
    }

    /// Removes the final 0 of each list if the model predicts the flow.
    pub(super) fn drop_final_zeros(&mut self) {
        if self.prediction != PredictionTarget::Flow {
            return;
        }
        for steps in std::iter::once(&mut self.steps).chain(self.step_lists.values_mut()) {
            if steps.last() == Some(&0.0) {
                steps.pop();
            }
        }
    }

    /// Renders the lists beside `schedule.steps`; empty if there are none, so that a stream without them keeps its digest.
    pub(super) fn render_step_lists(&self) -> String {
        if self.step_lists.is_empty() {
            return String::new();
        }
        let line = |(name, steps): (&String, &Vec<f64>)| format!("{} = {steps:?}\n", quote_toml(name));
        format!("\n[schedule.lists]\n{}", self.step_lists.iter().map(line).collect::<String>())
    }

    /// Describes what is wrong with the lists, apart from the noise of their first steps.
    pub(super) fn describe_bad_steps(&self) -> Vec<String> {
        let mut found = self.describe_bad_list("schedule.steps", &self.steps);
        if self.step_lists.len() > LISTS_MAX {
            found.push(format!(
                "schedule.lists has {} entries, the limit is {LISTS_MAX}",
                self.step_lists.len()
            ));
        }
        for (name, steps) in &self.step_lists {
            let key = format!("schedule.lists.{name}");
            let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_word) {
                found.push(format!(
                    "{key}: a name has 1 to {NAME_BYTES_MAX} lower-case letters, digits and hyphens"
                ));
            } else if name == DEFAULT_STEP_LIST {
                found.push(format!("{key}: this name means schedule.steps"));
            }
            found.extend(self.describe_bad_list(&key, steps));
        }
        found
    }

    fn describe_bad_list(&self, key: &str, steps: &[f64]) -> Vec<String> {
        let mut found = Vec::new();
        if steps.len() > STEPS_MAX {
            found.push(format!("{key} has {} entries, the limit is {STEPS_MAX}", steps.len()));
        }
        let falling = steps.windows(2).all(|p| p[0] > p[1]);
        let in_range = steps.iter().all(|t| *t > 0.0 && *t <= 1000.0);
        if steps.is_empty() || !falling || !in_range {
            found.push(format!("{key} {steps:?} must decrease from at most 1000 to above 0"));
        }
        if let Some(t) = steps.iter().find(|t| self.warp && t.fract() != 0.0) {
            found.push(format!(
                "step {t} of {key} lies between rows {} and {} of the noise schedule; a warped step is one row",
                1000.0 - t.ceil(),
                1000.0 - t.floor()
            ));
        }
        found
    }

    fn compute_steps(&self, steps: &[f64]) -> Vec<SigmaStep> {
        compute_sigma_steps(steps, self.shift, self.warp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WanConfig;

    fn parse(schedule: &str) -> Result<StreamConfig, Vec<String>> {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let text = format!("[video]\nwidth = 16\nheight = 16\n[schedule]\n{schedule}\n");
        StreamConfig::parse("s", &text, &wan).map_err(|ds| ds.into_iter().map(|d| d.message).collect())
    }

    #[test]
    fn lists_are_read_computed_and_rendered_again() {
        let lists = "[schedule.lists]\nfast = [1000, 500, 0]\n\"one-step\" = [1000]";
        let stream = parse(lists).unwrap();
        let all = stream.all_step_lists();
        let summary: Vec<_> = all.iter().map(|(name, steps)| (*name, steps.len())).collect();
        assert_eq!(
            summary,
            [(DEFAULT_STEP_LIST, 4), ("fast", 2), ("one-step", 1)],
            "a flow needs no step at 0"
        );
        assert_eq!(all[1].1[1].sigma, all[0].1[2].sigma, "both are step 500");
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        assert_eq!(StreamConfig::parse("again", &stream.to_toml(), &wan).unwrap(), stream);
        assert!(!parse("").unwrap().to_toml().contains("lists"));
    }

    #[test]
    fn a_list_obeys_the_rules_of_the_steps() {
        for (lists, what) in [
            ("default = [1000]", "this name means schedule.steps"),
            ("Fast = [1000]", "lower-case"),
            ("fast = []", "must decrease"),
            ("fast = [1000, 1000]", "must decrease"),
            ("fast = [1000, 99.5]", "rows"),
            ("fast = [500]", "first step 500"),
            ("fast = 5", "a table of lists of numbers"),
        ] {
            let found = parse(&format!("[schedule.lists]\n{lists}")).unwrap_err();
            assert!(found.iter().any(|m| m.contains(what)), "{lists}: {found:?}");
        }
        let many: String = (0..9).map(|i| format!("l{i} = [1000]\n")).collect();
        let found = parse(&format!("[schedule.lists]\n{many}")).unwrap_err();
        assert!(found[0].contains("the limit is 8"), "{found:?}");
    }
}
