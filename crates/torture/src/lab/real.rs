//! A real host, reached by `ssh` as root. For the time of a lab it has one more address, in
//! 10.77.0.0/24, on the interface that leads here, and a cgroup that holds what we start there.
//!
//! Nothing is installed: programs of ours are copied to [`BROUGHT`], what else is wanted (Redis)
//! has to be there.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};

use nix::sys::signal::Signal;

use super::{Doing, LAB_DIR, LabError, Process, SERVICE_CIDR, lock};
use crate::clock::Instant;

/// Where our programs are on a real host.
const BROUGHT: &str = "/var/tmp/hotspare-bench";
/// The clock of the other host is asked so often; the shortest way tells it best.
const CLOCK_QUESTIONS: usize = 7;
/// What a started program says of itself first.
pub(super) const PID: &str = "hotspare-bench: pid ";

/// What has been copied, by host and place here.
static BROUGHT_ALREADY: LazyLock<Mutex<HashSet<(String, PathBuf)>>> = LazyLock::new(Mutex::default);

/// A connection to one of them.
#[derive(Debug)]
pub struct Real {
    target: String,
    ssh: Vec<String>,
    /// Its interface that leads here.
    device: String,
    /// Of what we start.
    cgroup: String,
    /// What its monotonic clock lacks to ours, ns.
    lag_ns: i64,
}

impl Real {
    /// Gets a host ready, as host `number` of a lab; ends what an earlier lab has left there.
    pub(super) fn new(target: &str, ssh: &[String], number: u8) -> Result<Arc<Real>, LabError> {
        let mut real = Real {
            target: target.to_owned(),
            ssh: ssh.to_vec(),
            device: String::new(),
            cgroup: String::new(),
            lag_ns: 0,
        };
        let said = real.sh(&format!(
            "set -e
             peer=${{SSH_CONNECTION%% *}}
             device=$(ip -o route get \"$peer\" | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p')
             root=$(awk '$3 == \"cgroup2\" {{ print $2; exit }}' /proc/mounts)
             group=$root/hotspare-bench-{number}
             mkdir -p \"$group\" {LAB_DIR} {BROUGHT}
             echo 1 > \"$group/cgroup.kill\"
             nft delete table netdev hotspare_bench 2> /dev/null || true
             ip address replace 10.77.0.{number}/24 dev \"$device\"
             echo \"$device $group\""
        ))?;
        let mut words = said.split_ascii_whitespace();
        let (Some(device), Some(cgroup)) = (words.next(), words.next()) else {
            let source = io::Error::other(format!("it said {said:?}"));
            return Err(LabError::Io { doing: format!("get {target} ready"), source });
        };
        (real.device, real.cgroup) = (device.to_owned(), cgroup.to_owned());
        real.lag_ns = real.lag()?;
        Ok(Arc::new(real))
    }

    /// What its monotonic clock (timer_list of proc(5)) lacks to ours.
    fn lag(&self) -> Result<i64, LabError> {
        let mut best = (u64::MAX, 0);
        for _ in 0..CLOCK_QUESTIONS {
            let asked = Instant::now().0;
            let said =
                self.sh("sed -n 's/^now at \\([0-9]*\\) nsecs/\\1/p;/^now/q' /proc/timer_list")?;
            let told = Instant::now().0;
            let theirs: u64 = said
                .trim()
                .parse()
                .map_err(io::Error::other)
                .doing(|| format!("read the clock of {} ({said:?})", self.target))?;
            let middle = asked + (told - asked) / 2;
            best = best.min((told - asked, middle as i64 - theirs as i64));
        }
        Ok(best.1)
    }

    /// What its monotonic clock lacks to ours, ns.
    pub(super) fn lag_ns(&self) -> i64 {
        self.lag_ns
    }

    fn ssh(&self) -> Command {
        let mut command = Command::new(&self.ssh[0]);
        command.args(&self.ssh[1..]).args(["-o", "BatchMode=yes", "-o", "ControlMaster=auto"]);
        // One connection for all: a question then takes one round trip.
        command.args(["-o", "ControlPath=/tmp/hotspare-ssh-%C", "-o", "ControlPersist=60"]);
        command.arg(&self.target);
        command
    }

    /// Runs a script of the shell there; what it has written.
    pub(super) fn sh(&self, script: &str) -> Result<String, LabError> {
        let doing = || format!("run on {}: {script}", self.target);
        let done = self.ssh().arg(script).stdin(Stdio::null()).output().doing(doing)?;
        if done.status.success() {
            return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        Err(LabError::Io { doing: doing(), source: io::Error::other(said) })
    }

    /// Writes a file there.
    pub(super) fn put(&self, path: &Path, bytes: &[u8]) -> Result<(), LabError> {
        let doing = || format!("write {} on {}", path.display(), self.target);
        let place = quoted(path.as_os_str());
        let script = format!("mkdir -p \"$(dirname {place})\" && cat > {place}");
        let mut child = self.ssh().arg(script).stdin(Stdio::piped()).spawn().doing(doing)?;
        let written = child.stdin.take().map_or(Ok(()), |mut to| to.write_all(bytes));
        let status = child.wait().doing(doing)?;
        written.doing(doing)?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(status.to_string())).doing(doing)
        }
    }

    /// A program of ours as it is there: copied, if it has not been yet.
    fn bring(&self, program: &Path) -> Result<PathBuf, LabError> {
        let name = program.file_name().unwrap_or_default();
        let there = Path::new(BROUGHT).join(name);
        let mut brought = lock(&BROUGHT_ALREADY);
        if brought.contains(&(self.target.clone(), program.to_owned())) {
            return Ok(there);
        }
        let doing = || format!("copy {} to {}", program.display(), self.target);
        let place = quoted(there.as_os_str());
        let script =
            format!("cat > {place}.new && chmod 755 {place}.new && mv {place}.new {place}");
        let file = File::open(program).doing(doing)?;
        let status = self.ssh().arg(script).stdin(file).status().doing(doing)?;
        if !status.success() {
            return Err(io::Error::other(status.to_string())).doing(doing);
        }
        brought.insert((self.target.clone(), program.to_owned()));
        Ok(there)
    }

    /// Makes sure that what this command needs of ours is there, and at the same place on every
    /// host: a spare compares what the guest has mapped.
    pub(super) fn bring_for(&self, command: &Command) -> Result<(), LabError> {
        words(command)
            .filter(|word| is_ours(word))
            .try_for_each(|word| self.bring(Path::new(word)).map(drop))
    }

    /// Starts a program there, in [`LAB_DIR`] and our cgroup.
    pub(super) fn spawn(self: &Arc<Self>, command: &Command) -> Result<Process, LabError> {
        let name = format!("start {:?} on {}", command.get_program(), self.target);
        self.bring_for(command)?;
        let there = |word: &OsStr| match is_ours(word) {
            true => Path::new(BROUGHT).join(Path::new(word).file_name().unwrap_or_default()).into(),
            false => word.to_owned(),
        };
        let all: Vec<String> = words(command).map(|word| quoted(&there(word))).collect();
        let set = command.get_envs().filter_map(|(name, value)| {
            Some(quoted(OsStr::new(&format!("{}={}", name.display(), value?.display()))))
        });
        let set: Vec<String> = set.collect();
        let script = format!(
            "echo $$ > {}/cgroup.procs; cd {LAB_DIR}; echo '{PID}'$$ >&2; exec env {} {}",
            quoted(OsStr::new(&self.cgroup)),
            set.join(" "),
            all.join(" ")
        );
        // A shell that understands this, whatever root's is.
        let script = format!("exec sh -c {}", quoted(OsStr::new(&script)));
        Process::start_there(self.ssh().arg(script), name, self)
    }

    /// Signals a process there. One that has ended takes no notice.
    pub(super) fn signal(&self, pid: i32, signal: Signal) -> Result<(), LabError> {
        self.sh(&format!("kill -{} {pid} 2> /dev/null || true", signal as i32)).map(drop)
    }

    /// Everything but our own connection is dropped, then all that we started dies. When the cable
    /// was out.
    pub(super) fn kill(&self) -> Result<Instant, LabError> {
        let device = &self.device;
        let chain = |hook: &str, port: &str| {
            format!(
                "add chain netdev hotspare_bench all_{hook} {{ type filter hook {hook} device \
                 \"{device}\" priority -500; }}; add rule netdev hotspare_bench all_{hook} tcp \
                 {port} '$port' accept; add rule netdev hotspare_bench all_{hook} drop; "
            )
        };
        let (inward, outward) = (chain("ingress", "dport"), chain("egress", "sport"));
        self.sh(&format!(
            "set -- $SSH_CONNECTION; port=$4; \
             nft 'add table netdev hotspare_bench; {inward}{outward}'"
        ))?;
        let death = Instant::now();
        self.sh(&format!("echo 1 > {}/cgroup.kill", self.cgroup))?;
        Ok(death)
    }

    /// Ends what we started there, and takes back what we changed.
    pub(super) fn release(&self, number: u8) {
        let (device, group) = (&self.device, &self.cgroup);
        let script = format!(
            "nft delete table netdev hotspare_bench 2> /dev/null; echo 1 > {group}/cgroup.kill; \
             ip address del 10.77.0.{number}/24 dev {device}; \
             ip address del {SERVICE_CIDR} dev {device} 2> /dev/null; \
             for wait in 1 2 3 4 5 6 7 8; do rmdir {group} 2> /dev/null && break; sleep 0.1; done; \
             true"
        );
        if let Err(error) = self.sh(&script) {
            tracing::error!(%error, "a host keeps what the lab has changed");
        }
    }

    /// Gives it one more address.
    pub(super) fn add_address(&self, cidr: &str) -> Result<(), LabError> {
        self.sh(&format!("ip address replace {cidr} dev {}", self.device)).map(drop)
    }

    /// Processor time of all that we started there, in seconds.
    pub(super) fn used_s(&self) -> Result<f64, LabError> {
        let said = self.sh(&format!("cat {}/cpu.stat", self.cgroup))?;
        let used = said.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok());
        let used: f64 = used.ok_or(io::ErrorKind::InvalidData).doing(|| "read cpu.stat".into())?;
        Ok(used / 1e6)
    }

    /// A file of `/proc/PID` there; empty if the process is gone.
    pub(super) fn proc(&self, pid: i32, name: &str) -> String {
        self.sh(&format!("cat /proc/{pid}/{name} 2> /dev/null || true")).unwrap_or_default()
    }

    /// The processes that we started there, and theirs.
    pub(super) fn pids(&self) -> Vec<i32> {
        let said = self.sh(&format!("cat {}/cgroup.procs", self.cgroup)).unwrap_or_default();
        said.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

fn words(command: &Command) -> impl Iterator<Item = &OsStr> {
    std::iter::once(command.get_program()).chain(command.get_args())
}

/// Whether a word names a program of ours, which the other host does not have.
fn is_ours(word: &OsStr) -> bool {
    let path = Path::new(word);
    let of_system = ["/usr", "/bin", "/sbin", "/lib", "/opt"];
    path.is_absolute()
        && !of_system.iter().any(|dir| path.starts_with(dir))
        && fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 1 != 0)
}

/// For a shell.
fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))
}

/// The interface of this machine that leads to `address`.
pub(super) fn device_to(address: &str) -> Result<String, LabError> {
    let doing = || format!("find the way to {address}");
    let said = Command::new("ip").args(["-o", "route", "get", address]).output().doing(doing)?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let mut words = said.split_ascii_whitespace().skip_while(|word| *word != "dev");
    words.nth(1).map(str::to_owned).ok_or(io::ErrorKind::NotFound).doing(doing)
}

impl Real {
    /// Its own address, as it sees our connection.
    pub(super) fn address(&self) -> Result<String, LabError> {
        Ok(self.sh("set -- $SSH_CONNECTION; echo $3")?.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        let word = "it's $HOME; \"x\" \\ `id`";
        let script = format!("printf %s {}", quoted(OsStr::new(word)));
        let said = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout), word);
    }

    #[test]
    fn programs_of_the_system_are_not_ours() {
        let own = std::env::current_exe().unwrap();
        assert!(is_ours(own.as_os_str()));
        for word in ["redis-server", "/bin/sh", "/no/such/program", "/tmp", "--port"] {
            assert!(!is_ours(OsStr::new(word)), "{word}");
        }
    }
}
