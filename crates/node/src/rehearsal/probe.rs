//! The probe: a command that says whether the copy does its work.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use hotspare_process::init::GuestNamespaces;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};

use super::report::{Probed, how_ended};
use crate::history::ms;

/// What is kept of the probe's output, bytes.
const TAIL_BYTES: usize = 4096;
/// How often it is looked at.
const BEAT: Duration = Duration::from_millis(20);

/// Starts `command` with `sh -c` inside all of the guest's namespaces, as root: it reaches the
/// guest's address and files, and nothing else. What it leaves running ends with the copy.
pub fn start(
    command: String,
    environment: Vec<(&'static str, String)>,
    namespaces: GuestNamespaces,
    patience: Duration,
) -> std::io::Result<JoinHandle<Probed>> {
    let run = move || {
        let began = Instant::now();
        let tried = try_run(&command, &environment, &namespaces, patience);
        let took_ms = ms(began.elapsed());
        match tried {
            Ok((how, status, output)) => Probed { command, status, how, took_ms, output },
            Err(error) => {
                let how = format!("could not be run: {error:#}");
                Probed { command, status: None, how, took_ms, output: String::new() }
            }
        }
    };
    std::thread::Builder::new().name("probe".into()).spawn(run)
}

type Seen = (String, Option<i32>, String);

fn try_run(
    command: &str,
    environment: &[(&str, String)],
    namespaces: &GuestNamespaces,
    patience: Duration,
) -> anyhow::Result<Seen> {
    namespaces.enter().context("enter the guest's namespaces")?;
    // For the children of this thread; it can start no thread any more.
    setns(namespaces.pid.as_fd(), CloneFlags::CLONE_NEWPID).context("enter its process numbers")?;
    let (reader, writer) = std::io::pipe().context("make a pipe")?;
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null());
    shell.stdout(writer.try_clone()?).stderr(writer);
    shell.envs(environment.iter().map(|(name, value)| (*name, value)));
    let child = shell.spawn().context("start /bin/sh")?;
    // Our copies of the writer go with it, or the end of the output would never be seen.
    drop(shell);
    follow(child, File::from(std::os::fd::OwnedFd::from(reader)), patience)
}

/// Reads until the probe ends, or takes too long.
fn follow(mut child: Child, mut reader: File, patience: Duration) -> anyhow::Result<Seen> {
    let deadline = Instant::now() + patience;
    let mut output = Vec::new();
    loop {
        // What it wrote before its end is there when that is seen.
        let ended = child.try_wait().context("wait for the probe")?;
        while is_readable(&reader) {
            let mut piece = [0u8; 4096];
            match reader.read(&mut piece) {
                Ok(0) | Err(_) => {
                    std::thread::sleep(BEAT);
                    break;
                }
                Ok(length) => keep_tail(&mut output, &piece[..length]),
            }
            if Instant::now() > deadline {
                break;
            }
        }
        let text = || String::from_utf8_lossy(&output).into_owned();
        if let Some(status) = ended {
            let (how, code) = words(status);
            return Ok((how, code, text()));
        }
        if Instant::now() > deadline {
            // Its children end with the copy.
            let _ = child.kill();
            let _ = child.wait();
            let how = format!("did not end within {:.0} s", patience.as_secs_f64());
            return Ok((how, None, text()));
        }
    }
}

fn keep_tail(output: &mut Vec<u8>, more: &[u8]) {
    output.extend_from_slice(more);
    let excess = output.len().saturating_sub(TAIL_BYTES);
    output.drain(..excess);
}

fn is_readable(reader: &File) -> bool {
    let mut one = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
    let wait = PollTimeout::try_from(BEAT).unwrap_or(PollTimeout::ZERO);
    poll(&mut one, wait).is_ok_and(|ready| ready > 0)
}

fn words(status: ExitStatus) -> (String, Option<i32>) {
    use std::os::unix::process::ExitStatusExt;
    match status.code() {
        Some(0) => ("succeeded".to_owned(), Some(0)),
        Some(127) => ("ended with status 127: is its command on this host?".to_owned(), Some(127)),
        code => (how_ended(Some(status.into_raw())).0, code),
    }
}
