//! A program on a simulated host, with what it has said so far.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use super::real::{PID, Real};
use super::{Doing, LabError, lock};
use crate::clock::Instant;

/// Until a program of a real host has said that it runs.
const START_AT_MOST: Duration = Duration::from_secs(60);

/// A line of output and when it was read.
#[derive(Clone, Debug)]
pub struct Line {
    /// When it arrived.
    pub at: Instant,
    /// Without its end of line.
    pub text: String,
}

/// Output of a program, line by line, as it comes. Cheap to clone; all clones see the same.
#[derive(Clone, Debug, Default)]
pub struct Output {
    shared: Arc<(Mutex<Said>, Condvar)>,
}

#[derive(Debug, Default)]
struct Said {
    lines: Vec<Line>,
    ended: bool,
}

impl Output {
    fn follow(stream: impl Read + Send + 'static) -> Output {
        let output = Output::default();
        let mine = output.clone();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut bytes = Vec::new();
            while matches!(reader.read_until(b'\n', &mut bytes), Ok(1..)) {
                let text = String::from_utf8_lossy(bytes.trim_ascii_end()).into_owned();
                mine.add(Line { at: Instant::now(), text });
                bytes.clear();
            }
            lock(&mine.shared.0).ended = true;
            mine.shared.1.notify_all();
        });
        output
    }

    fn add(&self, line: Line) {
        lock(&self.shared.0).lines.push(line);
        self.shared.1.notify_all();
    }

    /// Everything said so far.
    pub fn lines(&self) -> Vec<Line> {
        lock(&self.shared.0).lines.clone()
    }

    /// Everything said so far, as text.
    pub fn text(&self) -> String {
        lock(&self.shared.0).lines.iter().map(|line| line.text.clone() + "\n").collect()
    }

    /// The last line so far that `pick` makes something of.
    pub fn last<T>(&self, pick: impl FnMut(&Line) -> Option<T>) -> Option<T> {
        lock(&self.shared.0).lines.iter().rev().find_map(pick)
    }

    /// Waits for a line, said or to be said, that `pick` makes something of.
    /// `None` if the output ends without, or none comes in time.
    pub fn find<T>(
        &self,
        at_most: Duration,
        mut pick: impl FnMut(&Line) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + at_most;
        let mut seen = 0;
        let mut said = lock(&self.shared.0);
        loop {
            while let Some(line) = said.lines.get(seen) {
                if let Some(found) = pick(line) {
                    return Some(found);
                }
                seen += 1;
            }
            let left = deadline.since(Instant::now());
            if said.ended || left.is_zero() {
                return None;
            }
            let waited = self.shared.1.wait_timeout(said, left);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the program has closed its end; false if it has not in time.
    pub fn ended(&self, at_most: Duration) -> bool {
        self.find(at_most, |_| None::<()>);
        lock(&self.shared.0).ended
    }
}

/// A running program; killed and reaped when dropped.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    name: String,
    stdout: Output,
    stderr: Output,
    end: Arc<(Mutex<Option<ExitStatus>>, Condvar)>,
    /// The real host where it runs, and its process id there.
    there: Option<(Arc<Real>, i32)>,
}

impl Process {
    pub(super) fn start(command: &mut Command, name: String) -> Result<Process, LabError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().doing(|| name.clone())?;
        let stdout = child.stdout.take().map(Output::follow).unwrap_or_default();
        let stderr = child.stderr.take().map(Output::follow).unwrap_or_default();
        let pid = Pid::from_raw(child.id() as i32);
        let end = Arc::default();
        let reaper_end = Arc::clone(&end);
        std::thread::spawn(move || reap(child, &reaper_end));
        Ok(Process { pid, name, stdout, stderr, end, there: None })
    }

    /// Starts `ssh`, whose other end says its process id first.
    pub(super) fn start_there(
        command: &mut Command,
        name: String,
        host: &Arc<Real>,
    ) -> Result<Process, LabError> {
        let mut process = Process::start(command, name)?;
        let pid = |line: &Line| line.text.strip_prefix(PID)?.parse::<i32>().ok();
        let Some(pid) = process.stderr.find(START_AT_MOST, pid) else {
            let what = format!("{}; it said {:?}", process.name, process.said());
            return Err(LabError::Deadline { what, waited: START_AT_MOST });
        };
        process.there = Some((Arc::clone(host), pid));
        Ok(process)
    }

    /// Its process id, on the machine where it runs.
    pub fn pid(&self) -> i32 {
        self.there.as_ref().map_or(self.pid.as_raw(), |(_, pid)| *pid)
    }

    /// A file of its `/proc/PID`; empty if it is gone.
    pub fn proc(&self, name: &str) -> String {
        match &self.there {
            Some((host, pid)) => host.proc(*pid, name),
            None => {
                std::fs::read_to_string(format!("/proc/{}/{name}", self.pid)).unwrap_or_default()
            }
        }
    }

    /// An instant of its clock on ours: real hosts have clocks of their own.
    pub fn instant(&self, ns: u64) -> Instant {
        let lag_ns = self.there.as_ref().map_or(0, |(host, _)| host.lag_ns());
        Instant(ns.saturating_add_signed(lag_ns))
    }

    /// What it writes to its standard output.
    pub fn stdout(&self) -> &Output {
        &self.stdout
    }

    /// What it writes to its standard error.
    pub fn stderr(&self) -> &Output {
        &self.stderr
    }

    /// All that it has written, its standard output first.
    pub fn said(&self) -> String {
        self.stdout.text() + &self.stderr.text()
    }

    /// Sends a signal to it alone. One that has ended takes no notice.
    pub fn signal(&self, signal: Signal) -> Result<(), LabError> {
        if let Some((host, pid)) = &self.there {
            return host.signal(*pid, signal);
        }
        // It cannot be reaped, and so its pid not be used again, while we hold the lock.
        let end = lock(&self.end.0);
        if end.is_none() {
            kill(self.pid, signal).doing(|| format!("signal `{}`", self.name))?;
        }
        Ok(())
    }

    /// How it ended; `None` if it has not.
    pub fn try_wait(&self) -> Option<ExitStatus> {
        *lock(&self.end.0)
    }

    /// Waits for its end and for the last of its output; fails if that takes longer than
    /// `at_most`. A child of it that keeps the output open counts as part of it.
    pub fn wait(&self, at_most: Duration) -> Result<ExitStatus, LabError> {
        let deadline = Instant::now() + at_most;
        let end = lock(&self.end.0);
        let waited = self.end.1.wait_timeout_while(end, at_most, |end| end.is_none());
        let status = *waited.unwrap_or_else(PoisonError::into_inner).0;
        let Some(status) = status else {
            let said = self.stdout.text() + &self.stderr.text();
            let what = format!("the end of `{}`, which has said:\n{said}", self.name);
            return Err(LabError::Deadline { what, waited: at_most });
        };
        self.stdout.ended(deadline.since(Instant::now()));
        self.stderr.ended(deadline.since(Instant::now()));
        Ok(status)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; then there is nothing to kill.
        let _ = self.signal(Signal::SIGKILL);
        if self.there.take().is_some() {
            // And the `ssh` that has started it.
            let _ = self.signal(Signal::SIGKILL);
        }
    }
}

/// Waits for the end of `child` and reaps it.
fn reap(mut child: Child, end: &(Mutex<Option<ExitStatus>>, Condvar)) {
    let pid = Pid::from_raw(child.id() as i32);
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    // Leave it a zombie until the lock is ours: nobody may signal a pid that is free.
    while waitid(Id::Pid(pid), flags) == Err(Errno::EINTR) {}
    let mut end_of_child = lock(&end.0);
    *end_of_child = child.wait().ok();
    end.1.notify_all();
}
