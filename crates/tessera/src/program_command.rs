//! How a process starts its own program again.

use std::process::Command;

/// The command that runs this program with other arguments: an executable, and the arguments before those of the command line. The
/// binary needs none of the latter; an interpreter gets there the name of the package with the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramCommand {
    executable: String,
    leading: Vec<String>,
}

impl ProgramCommand {
    /// The program is this executable.
    #[must_use]
    pub fn from_executable(executable: impl Into<String>) -> ProgramCommand {
        ProgramCommand { executable: executable.into(), leading: Vec::new() }
    }

    /// An interpreter runs the program when it gets these arguments first.
    #[must_use]
    pub fn from_interpreter(executable: impl Into<String>, leading: Vec<String>) -> ProgramCommand {
        ProgramCommand { executable: executable.into(), leading }
    }

    /// Returns the command line with these arguments of the program.
    #[must_use]
    pub fn to_argv(&self, arguments: &[&str]) -> Vec<String> {
        let arguments = arguments.iter().map(ToString::to_string);
        [self.executable.clone()].into_iter().chain(self.leading.iter().cloned()).chain(arguments).collect()
    }

    /// Returns the command, to which the arguments of the program are added.
    #[must_use]
    pub fn to_command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.leading);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_follow_those_of_an_interpreter() {
        let binary = ProgramCommand::from_executable("/bin/tessera");
        assert_eq!(binary.to_argv(&["rank"]), ["/bin/tessera", "rank"]);
        let python = ProgramCommand::from_interpreter("python3", vec!["-m".into(), "tessera".into()]);
        assert_eq!(python.to_argv(&["drill", "--list"]), ["python3", "-m", "tessera", "drill", "--list"]);
        let command = python.to_command();
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["-m", "tessera"]);
    }
}
