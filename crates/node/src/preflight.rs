//! `hotspare check`: can this kernel, and this program, be protected?

use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;
use hotspare_kernel::userfaultfd;

/// Exit status when something is in the way.
const OBSTACLE: u8 = 2;

/// What to look at.
#[derive(Debug, Args)]
pub struct CheckArguments {
    /// A running process to look at.
    #[arg(long)]
    pid: Option<i32>,
    /// A program to look for.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Something that stands in the way, and the way out.
struct Obstacle {
    what: String,
    way_out: String,
}

fn obstacle(what: impl Into<String>, way_out: impl Into<String>) -> Obstacle {
    Obstacle { what: what.into(), way_out: way_out.into() }
}

/// Fails with a clear message where the kernel cannot do it.
pub fn require_kernel() -> anyhow::Result<()> {
    match kernel().into_iter().next() {
        None => Ok(()),
        Some(first) => bail!("{}: {} (`hotspare check` lists all)", first.what, first.way_out),
    }
}

/// Prints what is in the way; the exit status says whether anything is.
pub fn check(arguments: &CheckArguments) -> anyhow::Result<u8> {
    let mut found = kernel();
    if let Some(pid) = arguments.pid {
        found.extend(process(pid)?);
    }
    if let Some(program) = arguments.command.first() {
        found.extend(executable(program));
    }
    if found.is_empty() {
        println!("nothing is in the way");
        return Ok(0);
    }
    for one in &found {
        println!("✗ {}\n  → {}", one.what, one.way_out);
    }
    Ok(OBSTACLE)
}

fn kernel() -> Vec<Obstacle> {
    let mut found = Vec::new();
    if !nix::unistd::geteuid().is_root() {
        found.push(obstacle("not root", "run it as root: it traces and rebuilds processes"));
        return found;
    }
    if let Err(error) = userfaultfd::probe() {
        found.push(obstacle(
            format!("writes cannot be tracked: {error}"),
            "Linux 6.7 or newer with CONFIG_USERFAULTFD is needed",
        ));
    }
    for (path, what, way_out) in [
        ("/proc/self/timers", "CONFIG_CHECKPOINT_RESTORE is off", "use a distribution kernel"),
        ("/proc/self/ns/time", "there are no time namespaces", "CONFIG_TIME_NS is needed"),
        ("/dev/fuse", "there is no /dev/fuse", "load the module: modprobe fuse"),
    ] {
        if !std::path::Path::new(path).exists() {
            found.push(obstacle(what, way_out));
        }
    }
    found
}

fn executable(program: &str) -> Vec<Obstacle> {
    let found = Command::new("sh").args(["-c", "command -v -- \"$0\"", program]).output();
    match found {
        Ok(output) if output.status.success() => Vec::new(),
        _ => vec![obstacle(format!("{program} is not found"), "give its path, or install it")],
    }
}

/// Kernel objects of a running process that have no road to the spare.
fn process(pid: i32) -> anyhow::Result<Vec<Obstacle>> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .with_context(|| format!("look at process {pid}"))?;
    for entry in entries {
        let path = entry?.path();
        let Ok(target) = std::fs::read_link(&path) else { continue };
        let target = target.to_string_lossy().into_owned();
        let known = ["[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[pidfd]"];
        if let Some(kind) = target.strip_prefix("anon_inode:")
            && !known.contains(&kind)
        {
            let fd = path.file_name().unwrap_or_default().to_string_lossy();
            found.push(obstacle(
                format!("descriptor {fd} is {kind}, which cannot be carried"),
                "turn off what uses it in the program's configuration; see LIMITS.md",
            ));
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    if tracer.is_some_and(|tracer| tracer.trim() != "0") {
        found.push(obstacle("it is being traced", "end the debugger"));
    }
    Ok(found)
}
