//! What a rehearsal has shown.

use serde::{Deserialize, Serialize};

/// The copy ran, or not, and this is what was seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Nothing was wrong.
    pub passed: bool,
    /// What was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The checkpoint that the copy ran from.
    pub at_epoch: u64,
    /// Copying the replicated directories, ms.
    pub files_ms: f64,
    /// Their size, in bytes of content.
    pub files_bytes: u64,
    /// Making the processes with all they map, ms.
    pub build_ms: f64,
    /// Copying memory, ms.
    pub copy_ms: f64,
    /// How much that was.
    pub copied_bytes: u64,
    /// Checkpoints that came meanwhile and were taken as well.
    pub followed: u64,
    /// From the last of them to processes that are ready to run, ms: what a takeover takes.
    pub finalise_ms: f64,
    /// How long the copy ran, ms.
    pub ran_ms: f64,
    /// Processes of the copy.
    pub processes: usize,
    /// Those that ended while it ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended: Vec<Ended>,
    /// What the probe said, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probed>,
}

/// A process that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Its number in the guest.
    pub pid: i32,
    /// In words.
    pub how: String,
    /// Not by itself and in order.
    pub badly: bool,
}

/// A probe that was run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probed {
    /// The command.
    pub command: String,
    /// Its exit status, if it came to that.
    pub status: Option<i32>,
    /// How it ended, in words.
    pub how: String,
    /// How long it took, ms.
    pub took_ms: f64,
    /// The last of what it wrote.
    pub output: String,
}

impl Report {
    /// Decides whether all was well. `why` is what went wrong before anything could be seen.
    pub fn judge(mut self, why: Option<String>, root: i32) -> Self {
        let badly = |ended: &&Ended| ended.badly || ended.pid == root;
        let ended = self.ended.iter().find(badly).map(|ended| {
            format!("process {} of the copy {} while it was to run on", ended.pid, ended.how)
        });
        let probe = self.probe.as_ref().filter(|probe| probe.status != Some(0));
        let probe = probe.map(|probe| format!("the probe {}", probe.how));
        let both = match (ended, probe) {
            (Some(ended), Some(probe)) => Some(format!("{probe}; {ended}")),
            (ended, probe) => probe.or(ended),
        };
        self.why = why.or(both);
        self.passed = self.why.is_none();
        self
    }

    /// In a sentence.
    pub fn words(&self) -> String {
        let Self { at_epoch, finalise_ms, ran_ms, processes, .. } = self;
        let mib = self.copied_bytes >> 20;
        match &self.why {
            None => format!(
                "REHEARSED: a copy of the ghost ({processes} processes, {mib} MiB) ran for \
                 {ran_ms:.0} ms from checkpoint {at_epoch} on, ready in {finalise_ms:.1} ms{}",
                if self.probe.is_some() { ", and the probe succeeded" } else { "" }
            ),
            Some(why) => format!("REHEARSAL FAILED: {why}"),
        }
    }

    /// For people, all of it.
    pub fn text(&self) -> String {
        let mut text = self.words() + "\n";
        let mut line = |name: &str, value: String| {
            text += &format!("  {name:<11}{value}\n");
        };
        line("checkpoint", format!("{} ({} came meanwhile)", self.at_epoch, self.followed));
        line("files", format!("{:.1} ms, {} bytes", self.files_ms, self.files_bytes));
        line("build", format!("{:.1} ms", self.build_ms));
        line("memory", format!("{:.1} ms, {} KiB copied", self.copy_ms, self.copied_bytes >> 10));
        line("finalise", format!("{:.1} ms", self.finalise_ms));
        line("ran", format!("{:.0} ms, {} processes", self.ran_ms, self.processes));
        for ended in &self.ended {
            line("ended", format!("process {} {}", ended.pid, ended.how));
        }
        if let Some(probe) = &self.probe {
            line("probe", format!("{} after {:.0} ms", probe.how, probe.took_ms));
            for said in probe.output.lines() {
                line("", format!("| {said}"));
            }
        }
        text
    }
}

/// How a process ended, by its wait(2) status; and whether badly.
pub fn how_ended(status: Option<i32>) -> (String, bool) {
    match status {
        None => ("ended".to_owned(), false),
        Some(status) if libc::WIFSIGNALED(status) => {
            let number = libc::WTERMSIG(status);
            let signal = nix::sys::signal::Signal::try_from(number);
            let name = signal.map_or(format!("signal {number}"), |signal| signal.to_string());
            (format!("was ended by {name}"), true)
        }
        Some(status) => {
            let code = libc::WEXITSTATUS(status);
            (format!("ended with status {code}"), code != 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(status: Option<i32>) -> Option<Probed> {
        Some(Probed { status, how: "ended with status 3".into(), ..Probed::default() })
    }

    #[test]
    fn a_rehearsal_passes_if_probe_and_processes_do() {
        let ended = |pid, status| {
            let (how, badly) = how_ended(Some(status));
            Ended { pid, how, badly }
        };
        let fine = Report { probe: probe(Some(0)), ended: vec![ended(7, 0)], ..Report::default() };
        assert!(fine.clone().judge(None, 2).passed, "a worker may end");
        assert!(!fine.clone().judge(None, 7).passed, "the program may not");
        assert!(!fine.clone().judge(Some("no memory".into()), 2).passed);
        let killed = Report { ended: vec![ended(7, libc::SIGSEGV)], ..fine.clone() }.judge(None, 2);
        assert!(killed.why.as_ref().is_some_and(|why| why.contains("SIGSEGV")), "{killed:?}");
        for wrong in [Some(3), None] {
            let judged = Report { probe: probe(wrong), ..fine.clone() }.judge(None, 2);
            assert!(judged.why.is_some_and(|why| why.contains("the probe")));
        }
    }
}
