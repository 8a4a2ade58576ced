//! MapReduce: a coordinator in the guest, workers outside that ask again when nobody answers. The
//! word count is byte for byte that of one process.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::list::examples_dir;
use super::{Check, Ending, Findings, Stage, WORK_DIR, Watch};
use crate::Host;
use crate::clock::Instant;
use crate::lab::{LabError, Process};
use crate::protected::HANG;

const WORKERS: usize = 2;
const JOB: [&str; 4] = ["-seed", "7", "-words", "5000"];
const WORK_AT_MOST: Duration = Duration::from_secs(120);

/// The command line of the coordinator.
pub(super) fn coordinator(port: u16) -> Vec<String> {
    let program = examples_dir().join("go-mapreduce").to_string_lossy().into_owned();
    let listen = format!(":{port}");
    let out = format!("{WORK_DIR}/counts");
    let words = [&program, "coordinator", "-lease", "1s", "-listen", &listen, "-out", &out];
    words.iter().chain(&JOB).map(|word| (*word).to_owned()).collect()
}

/// Workers on the client's host do the job.
pub(super) struct WordsCheck;

impl Check for WordsCheck {
    fn prepare(&self, _host: &Host) -> Result<(), LabError> {
        Ok(())
    }

    fn rehearse(&self, stage: &Stage) -> Result<Box<dyn Watch>, LabError> {
        let expected = stage.reference().run(command("reference").args(JOB), WORK_AT_MOST)?;
        Ok(Box::new(WordsWatch { expected, workers: vec![], start: String::new() }))
    }
}

fn command(part: &str) -> Command {
    let mut command = Command::new(examples_dir().join("go-mapreduce"));
    command.arg(part);
    command
}

struct WordsWatch {
    expected: String,
    workers: Vec<Process>,
    /// What the coordinator drew when it was started.
    start: String,
}

/// Asks the coordinator who it is, until it answers.
fn start_of(stage_client: &Host, server: &str) -> Result<String, LabError> {
    let deadline = Instant::now() + HANG;
    loop {
        let asked = stage_client.run(command("status").args(["-dial", server]), HANG);
        let start = asked.as_ref().ok().and_then(|said| {
            let said: serde_json::Value = serde_json::from_str(said).ok()?;
            Some(said.get("Start")?.as_str()?.to_owned())
        });
        match (start, asked) {
            (Some(start), _) => return Ok(start),
            (None, Err(error)) if Instant::now() > deadline => return Err(error),
            (None, _) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

impl Watch for WordsWatch {
    fn begin(&mut self, stage: &Stage) -> Result<(), LabError> {
        let server = stage.service.to_string();
        self.start = start_of(stage.lab.client(), &server)?;
        for _ in 0..WORKERS {
            let mut worker = command("worker");
            worker.args(["-pause", "60ms", "-dial", &server]);
            self.workers.push(stage.lab.client().spawn(&mut worker)?);
        }
        Ok(())
    }

    /// It shows itself at the end only.
    fn goes_on(&mut self, _death: Instant) -> bool {
        true
    }

    /// 64 map tasks and 8 reduce tasks, each with the workers' pause.
    fn length(&self) -> Option<Duration> {
        Some(Duration::from_millis(60) * (64 + 8) / WORKERS as u32)
    }

    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<Findings, LabError> {
        let mut findings = Findings::default();
        for worker in &self.workers {
            let status = worker.wait(WORK_AT_MOST)?;
            if !status.success() {
                findings.wrongs.push(format!("worker: {status}: {}", worker.stderr().text()));
            }
        }
        let server = ending.service.to_string();
        if start_of(ending.client, &server)? == self.start {
            findings.facts.push("resumed, not restarted".to_owned());
        } else {
            findings.wrongs.push("the coordinator was restarted".to_owned());
        }
        let counts = ending.host.inside(|| fs::read_to_string(Path::new(WORK_DIR).join("counts")));
        match counts {
            Ok(counts) if counts == self.expected => {
                findings.facts.push(format!("{} words counted right", counts.lines().count()));
            }
            Ok(counts) => {
                let (found, expected) = (counts.lines().count(), self.expected.lines().count());
                findings.wrongs.push(format!("wrong counts, {found} words of {expected}"));
            }
            Err(error) => findings.wrongs.push(format!("no counts: {error}")),
        }
        Ok(findings)
    }
}
