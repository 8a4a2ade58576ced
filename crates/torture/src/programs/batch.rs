//! Programs that come to an end: what they leave is the same as without a failover.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{Check, Ending, Findings, Stage, WORK_DIR, Watch, put, start};
use crate::Host;
use crate::clock::Instant;
use crate::lab::LabError;
use crate::protected::HANG;

/// The longest that a batch program may take, on a machine that has much else to do.
const BATCH_AT_MOST: Duration = Duration::from_secs(180);

/// Compares the files that a program has written with those of an undisturbed run.
pub(super) struct BatchCheck {
    /// Files to put on every host: name in the lab's directory, content.
    pub(super) files: Vec<(&'static str, Vec<u8>)>,
    /// Files in [`WORK_DIR`] that must be byte-equal.
    pub(super) outputs: &'static [&'static str],
    /// A command that looks at the result on its host, and what it must print. `None` as text:
    /// the same as after the undisturbed run.
    pub(super) inspect: Option<&'static str>,
    /// Files in [`WORK_DIR`] that are written once, at the start, and must stay as they are.
    pub(super) kept: &'static [&'static str],
    /// What the undisturbed run has left, once there was one.
    pub(super) undisturbed: OnceLock<Arc<Left>>,
}

impl Check for BatchCheck {
    fn prepare(&self, host: &Host) -> Result<(), LabError> {
        self.files.iter().try_for_each(|(name, content)| put(host, name, content))
    }

    fn rehearse(&self, stage: &Stage) -> Result<Box<dyn Watch>, LabError> {
        let (outputs, inspect) = (self.outputs, self.inspect);
        let expected = match self.undisturbed.get() {
            Some(left) => Arc::clone(left),
            None => {
                let host = stage.reference();
                let born = Instant::now();
                let reference = start(host, &stage.command)?;
                let status = reference.wait(BATCH_AT_MOST)?.code().unwrap_or(-1);
                let length = Instant::now().since(born);
                let left = Arc::new(Left { length, ..Left::of(host, status, outputs, inspect)? });
                Arc::clone(self.undisturbed.get_or_init(|| left))
            }
        };
        let kept = self.kept.iter().map(|name| (*name, Vec::new())).collect();
        Ok(Box::new(BatchWatch { expected, outputs, inspect, kept }))
    }
}

struct BatchWatch {
    expected: Arc<Left>,
    outputs: &'static [&'static str],
    inspect: Option<&'static str>,
    /// Files that must stay as they are, and their content after the start.
    kept: Vec<(&'static str, Vec<u8>)>,
}

/// What a program has left.
#[derive(Debug)]
pub(super) struct Left {
    status: i32,
    length: Duration,
    files: Vec<Option<Vec<u8>>>,
    inspected: String,
}

impl Left {
    fn of(
        host: &Host,
        status: i32,
        outputs: &[&str],
        inspect: Option<&str>,
    ) -> Result<Left, LabError> {
        let files = outputs.iter().map(|name| read(host, name)).collect();
        let inspected = match inspect {
            Some(script) => host.run(Command::new("sh").args(["-c", script]), BATCH_AT_MOST)?,
            None => String::new(),
        };
        Ok(Left { status, length: Duration::ZERO, files, inspected })
    }
}

impl Watch for BatchWatch {
    fn begin(&mut self, stage: &Stage) -> Result<(), LabError> {
        for (name, content) in &mut self.kept {
            *content = wait_for_file(stage.lab.host(0), name)?;
        }
        Ok(())
    }

    /// It shows itself at the end only.
    fn goes_on(&mut self, _death: Instant) -> bool {
        true
    }

    fn length(&self) -> Option<Duration> {
        Some(self.expected.length)
    }

    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<Findings, LabError> {
        let status = ending.exit_status(BATCH_AT_MOST)?;
        let found = Left::of(ending.host, status, self.outputs, self.inspect)?;
        let expected = &self.expected;
        let mut findings = Findings::default();
        if status != 0 || expected.status != 0 {
            let undisturbed = expected.status;
            findings.wrongs.push(format!("exit status {status}; undisturbed {undisturbed}"));
        }
        for ((name, found), expected) in self.outputs.iter().zip(&found.files).zip(&expected.files)
        {
            match compare(found.as_deref(), expected.as_deref()) {
                Ok(bytes) => findings.facts.push(format!("{name}: {bytes} bytes equal")),
                Err(wrong) => findings.wrongs.push(format!("{name}: {wrong}")),
            }
        }
        for (name, kept) in &self.kept {
            match compare(read(ending.host, name).as_deref(), Some(kept)) {
                Ok(_) => findings.facts.push("resumed, not restarted".to_owned()),
                Err(wrong) => findings.wrongs.push(format!("{name}: {wrong}")),
            }
        }
        if found.inspected != expected.inspected {
            let wrong = format!("found {:?}, expected {:?}", found.inspected, expected.inspected);
            findings.wrongs.push(wrong);
        } else if !found.inspected.is_empty() {
            findings.facts.push(found.inspected.trim().replace('\n', ", "));
        }
        Ok(findings)
    }
}

/// A file in [`WORK_DIR`], as the host sees it.
fn read(host: &Host, name: &str) -> Option<Vec<u8>> {
    let path = Path::new(WORK_DIR).join(name);
    host.inside(move || fs::read(path).ok())
}

/// Waits until a file that is written in one go has content.
fn wait_for_file(host: &Host, name: &str) -> Result<Vec<u8>, LabError> {
    let deadline = Instant::now() + HANG;
    while Instant::now() < deadline {
        if let Some(content) = read(host, name).filter(|content| content.ends_with(b"\n")) {
            return Ok(content);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(LabError::Deadline { what: format!("the file {name}"), waited: HANG })
}

/// The length of two equal files, or where they differ.
fn compare(found: Option<&[u8]>, expected: Option<&[u8]>) -> Result<usize, String> {
    let (Some(found), Some(expected)) = (found, expected) else {
        let is_there = |file: Option<&[u8]>| if file.is_some() { "there" } else { "not there" };
        return Err(format!("{}, undisturbed {}", is_there(found), is_there(expected)));
    };
    if expected.is_empty() {
        return Err("empty, even undisturbed".to_owned());
    }
    if found == expected {
        return Ok(found.len());
    }
    let same = found.iter().zip(expected).take_while(|(found, expected)| found == expected);
    let (same, found, expected) = (same.count(), found.len(), expected.len());
    Err(format!("differs from byte {same} on; {found} bytes, undisturbed {expected}"))
}
