//! Simulated hosts: each a network namespace, a mount namespace with directories of its own, and
//! a cgroup that holds every process of it.
//!
//! ```text
//!   host 0        host 1         client
//!   eth0│         eth0│          eth0│        10.77.0.1, .2, …; client .100; fd77::…
//!   ════╪═════════════╪══════════════╪════    bridge, in the switch's network namespace
//! ```
//!
//! The network of the machine itself is never touched. Namespaces have no names, so they end with
//! this process however it ends; what can outlive it (processes in cgroups, directories) is
//! removed when a [`Lab`] is dropped, or by the next run.
//!
//! What needs no more of a host than that programs run there, that it has an address and that it
//! can die runs on real ones, too ([`ground`]).

mod cell;
pub mod ground;
mod leftovers;
mod process;
mod real;
pub mod strain;
mod switch;
pub mod wire;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hotspare_kernel::Namespaces;
use nix::mount::{MsFlags, mount};

use self::cell::Cell;
use self::ground::{Ground, Pin, Pinned};
use self::real::Real;
use self::switch::Switch;
use self::wire::Wire;
use crate::clock::Instant;

pub use self::process::{Line, Output, Process};

/// What can go wrong in a lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A simulated host needs root, to make namespaces.
    #[error("simulated hosts need root (namespaces, cgroups): run this as root")]
    NotRoot,
    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// The answer of the kernel.
        source: io::Error,
    },
    /// `ip` or `nft` refused.
    #[error("{tool} failed: {said}\n(script: {script})")]
    Tool {
        /// The program.
        tool: &'static str,
        /// Its standard error.
        said: String,
        /// What it was told to do.
        script: String,
    },
    /// Not all that can be done to a simulated host can be done to a real one.
    #[error("{host} is a real host, which does not {wanted}: simulated hosts do")]
    Real {
        /// Its name.
        host: String,
        /// What it was asked to do.
        wanted: &'static str,
    },
    /// Something awaited did not happen in time.
    #[error("waited {waited:?} in vain for {what}")]
    Deadline {
        /// What was awaited.
        what: String,
        /// For how long.
        waited: Duration,
    },
}

/// Gives an [`io::Error`] the words of what was being done.
pub(crate) trait Doing<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T, LabError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T, LabError> {
        self.map_err(|source| LabError::Io { doing: doing(), source: source.into() })
    }
}

/// Directories that each host has for itself, at the same path on every host.
pub const PRIVATE_DIRS: [&str; 3] = [LAB_DIR, "/run/hotspare", "/var/lib/hotspare"];

/// The directory of a host's programs: configurations, data, files to replicate.
pub const LAB_DIR: &str = "/srv/hotspare-lab";

/// The address that guests offer their service on; no host has it by default.
pub const SERVICE_V4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
/// As [`SERVICE_V4`].
pub const SERVICE_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x50);
/// [`SERVICE_V4`] with its prefix, as `--service-address` takes it.
pub const SERVICE_CIDR: &str = "10.77.0.50/24";

/// A set of simulated hosts and a client, joined by a switch.
#[derive(Debug)]
pub struct Lab {
    hosts: Vec<Arc<Host>>,
    client: Arc<Host>,
    /// Of simulated hosts, with their directories.
    switch: Option<(Arc<Switch>, PathBuf)>,
}

impl Lab {
    /// Makes `count` hosts and a client. Removes what an earlier run that was killed left.
    pub fn new(count: usize) -> Result<Lab, LabError> {
        match ground::chosen() {
            Some(Ground::Real { hosts, ssh }) => Lab::over(count, hosts, ssh),
            _ => Lab::with_wires(count, 0),
        }
    }

    /// A lab of real hosts, with clients on this machine.
    fn over(count: usize, targets: &[String], ssh: &[String]) -> Result<Lab, LabError> {
        if targets.len() < count {
            let source = io::Error::other(format!("{count} are wanted, {} named", targets.len()));
            return Err(LabError::Io { doing: "find enough hosts".to_owned(), source });
        }
        let mut hosts = Vec::new();
        for (number, target) in (1..).zip(&targets[..count]) {
            let real = Real::new(target, ssh, number)?;
            let (name, place) = (format!("host{}", number - 1), Place::Real(real));
            hosts.push(Arc::new(Host { name, number, place }));
        }
        let first = match &hosts[0].place {
            Place::Real(real) => real.address()?,
            Place::Simulated(_) | Place::Here(_) => String::new(),
        };
        let device = real::device_to(&first)?;
        let client = Host { name: "client".to_owned(), number: 100, place: Place::Here(device) };
        client.add_address(&format!("{}/24", client.v4()))?;
        Ok(Lab { hosts, client: Arc::new(client), switch: None })
    }

    /// As [`Lab::new`]; the first `wires` hosts hang on a [`Wire`] each.
    pub fn with_wires(count: usize, wires: usize) -> Result<Lab, LabError> {
        Lab::furnished(count, wires, None)
    }

    /// As [`Lab::with_wires`], and with `disk_bytes` each host has a disk of its own of this size
    /// at [`strain::DISK`]; it is a new one when the host starts anew.
    pub fn furnished(count: usize, wires: usize, disk_bytes: Option<u64>) -> Result<Lab, LabError> {
        if !nix::unistd::geteuid().is_root() {
            return Err(LabError::NotRoot);
        }
        assert!(count < 50, "addresses are given out for fewer than 50 hosts");
        leftovers::sweep()?;
        let dir = leftovers::claim_dir()?;
        let switch = Arc::new(Switch::new()?);
        let make = |name: &str, number: u8| -> Result<Arc<Host>, LabError> {
            let wire = (usize::from(number) <= wires).then(Wire::default);
            Ok(Arc::new(Host::new(name, number, &dir, &switch, (wire, disk_bytes))?))
        };
        let hosts = (0..count)
            .map(|index| make(&format!("host{index}"), index as u8 + 1))
            .collect::<Result<Vec<_>, _>>()?;
        let client = make("client", 100)?;
        Ok(Lab { hosts, client, switch: Some((switch, dir)) })
    }

    /// The hosts, in order of their addresses.
    pub fn hosts(&self) -> &[Arc<Host>] {
        &self.hosts
    }

    /// The host with this index; panics if there is none.
    pub fn host(&self, index: usize) -> &Arc<Host> {
        &self.hosts[index]
    }

    /// The host where clients run.
    pub fn client(&self) -> &Arc<Host> {
        &self.client
    }

    /// Drops every frame from one host to another at the switch, until [`Lab::heal`]. Call it
    /// twice, with the hosts swapped, to cut both directions.
    pub fn cut(&self, from: &Host, to: &Host) -> Result<(), LabError> {
        from.simulated("lose single links")?.switch.cut(&from.port(), &to.port())
    }

    /// Undoes every [`Lab::cut`]; how many frames they have dropped.
    pub fn heal(&self) -> Result<u64, LabError> {
        self.switch.as_ref().map_or(Ok(0), |(switch, _)| switch.heal())
    }

    /// Where the lab keeps its directories, as seen from outside of the hosts. Panics if they are
    /// real.
    pub fn dir(&self) -> &Path {
        self.switch.as_ref().map(|(_, dir)| &**dir).expect("simulated hosts have directories here")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for host in self.hosts.iter().chain([&self.client]) {
            match &host.place {
                Place::Simulated(own) => own.cell.kill_all_quietly(),
                Place::Real(real) => real.release(host.number),
                Place::Here(device) => {
                    let address = format!("{}/24", host.v4());
                    let mut ip = Command::new("ip");
                    // Its interface may be gone, and the address with it.
                    let _ = ip.args(["address", "del", &address, "dev", device]).output();
                }
            }
        }
        if let Some((_, dir)) = &self.switch {
            leftovers::release_dir(dir);
        }
    }
}

/// One host.
#[derive(Debug)]
pub struct Host {
    name: String,
    number: u8,
    place: Place,
}

/// Where a host is.
#[derive(Debug)]
enum Place {
    Simulated(Box<Simulated>),
    Real(Arc<Real>),
    /// This machine, as the client of real hosts; the interface that leads to them.
    Here(String),
}

/// What a simulated host is made of.
#[derive(Debug)]
struct Simulated {
    namespaces: std::sync::Mutex<Arc<Namespaces>>,
    cell: Cell,
    switch: Arc<Switch>,
    wire: Option<Wire>,
    disk_bytes: Option<u64>,
    dir: PathBuf,
    pin: Option<Pin>,
}

impl Simulated {
    fn namespaces(&self) -> Arc<Namespaces> {
        Arc::clone(&lock(&self.namespaces))
    }
}

impl Host {
    fn new(
        name: &str,
        number: u8,
        lab: &Path,
        switch: &Arc<Switch>,
        (wire, disk_bytes): (Option<Wire>, Option<u64>),
    ) -> Result<Host, LabError> {
        let dir = lab.join(name);
        let cell = Cell::new(&leftovers::owner(), lab, name)?;
        let namespaces = furnish(&dir, name, disk_bytes)?;
        let pin = match ground::chosen() {
            Some(Ground::Here(Some(pins))) => pins.of_host(name),
            _ => None,
        };
        let own = Simulated {
            namespaces: std::sync::Mutex::new(namespaces),
            cell,
            switch: Arc::clone(switch),
            wire,
            disk_bytes,
            dir,
            pin,
        };
        let host = Host { name: name.to_owned(), number, place: Place::Simulated(Box::new(own)) };
        host.plug_in()?;
        Ok(host)
    }

    /// What it is made of, if somebody wants what only a simulated host does.
    fn simulated(&self, wanted: &'static str) -> Result<&Simulated, LabError> {
        match &self.place {
            Place::Simulated(own) => Ok(own),
            Place::Real(_) | Place::Here(_) => {
                Err(LabError::Real { host: self.name.clone(), wanted })
            }
        }
    }

    /// Its name: `host0`, `host1`, … or `client`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What carries its frames, if that can be disturbed.
    pub fn wire(&self) -> Option<&Wire> {
        self.simulated("hang on a wire").ok()?.wire.as_ref()
    }

    /// Its own IPv4 address, in 10.77.0.0/24.
    pub fn v4(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, self.number)
    }

    /// Its own IPv6 address, in fd77::/64.
    pub fn v6(&self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, u16::from(self.number))
    }

    /// Its IPv4 address with a port.
    pub fn socket(&self, port: u16) -> SocketAddr {
        (IpAddr::from(self.v4()), port).into()
    }

    /// Where a private path of this host lies as seen from outside of it.
    /// Panics if the path is not in one of [`PRIVATE_DIRS`], or the host is a real one.
    pub fn outside(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        assert!(
            PRIVATE_DIRS.iter().any(|dir| inside.starts_with(dir)),
            "{} is not private to a host",
            inside.display()
        );
        let own = self.simulated("have its files here").expect("its files are here");
        own.dir.join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// Writes a file of this host, in one of [`PRIVATE_DIRS`].
    pub fn put(&self, path: impl AsRef<Path>, bytes: &[u8]) -> Result<(), LabError> {
        if let Place::Real(real) = &self.place {
            return real.put(path.as_ref(), bytes);
        }
        let path = self.outside(path);
        let doing = || format!("write {}", path.display());
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).doing(doing)?;
        }
        fs::write(&path, bytes).doing(doing)
    }

    /// Makes an empty directory of this host in one of [`PRIVATE_DIRS`], in place of what is there.
    pub fn empty_dir(&self, path: impl AsRef<Path>) -> Result<(), LabError> {
        if let Place::Real(real) = &self.place {
            let path = path.as_ref().display();
            return real.sh(&format!("rm -rf {path} && mkdir -p {path}")).map(drop);
        }
        let path = self.outside(path);
        let doing = || format!("empty {}", path.display());
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).doing(doing),
            _ => fs::create_dir_all(&path).doing(doing),
        }
    }

    /// Starts a program on this host, in [`LAB_DIR`], its output kept line by line.
    pub fn spawn(&self, command: &mut Command) -> Result<Process, LabError> {
        self.spawn_on(command, |pin| &pin.programs)
    }

    /// As [`Host::spawn`], on the processors of agents.
    pub fn spawn_agent(&self, command: &mut Command) -> Result<Process, LabError> {
        self.spawn_on(command, |pin| &pin.agent)
    }

    fn spawn_on(
        &self,
        command: &mut Command,
        processors: fn(&Pin) -> &[usize],
    ) -> Result<Process, LabError> {
        let name = format!("start {:?} on {}", command.get_program(), self.name);
        let own = match &self.place {
            Place::Simulated(own) => own,
            Place::Real(real) => return real.spawn(command),
            Place::Here(_) => return Process::start(command, name),
        };
        let procs = own.cell.procs()?;
        let namespaces = own.namespaces();
        namespaces.confine(command, OsStr::new(LAB_DIR), procs).doing(|| name.clone())?;
        let pinned = own.pin.as_ref().map(|pin| Pinned::to(processors(pin))).transpose();
        let _pinned = pinned.doing(|| format!("pin {name}"))?;
        Process::start(command, name)
    }

    /// Has ready what this command, which runs on another host, needs of ours.
    pub(crate) fn bring_for(&self, command: &Command) -> Result<(), LabError> {
        match &self.place {
            Place::Real(real) => real.bring_for(command),
            Place::Simulated(_) | Place::Here(_) => Ok(()),
        }
    }

    /// What a guest is started with so that it does not stay on the processors of its agent.
    pub fn moves_to_its_processors(&self) -> Vec<String> {
        let Some(pin) = self.simulated("pin").ok().and_then(|own| own.pin.as_ref()) else {
            return vec![];
        };
        let all: Vec<String> = pin.programs.iter().map(ToString::to_string).collect();
        vec!["taskset".to_owned(), "-c".to_owned(), all.join(",")]
    }

    /// Runs a program on this host to its end; an exit status other than 0 is an error that
    /// carries its output.
    pub fn run(&self, command: &mut Command, at_most: Duration) -> Result<String, LabError> {
        let process = self.spawn(command)?;
        let status = process.wait(at_most)?;
        let (said, erred) = (process.stdout().text(), process.stderr().text());
        if status.success() {
            return Ok(said);
        }
        let source = io::Error::other(format!("{status}\n{said}{erred}"));
        Err(LabError::Io { doing: format!("{command:?} on {}", self.name), source })
    }

    /// Runs `work` on a thread of this process that is inside this host: sockets it makes and
    /// paths it opens are the host's.
    pub fn thread<T, F>(&self, work: F) -> JoinHandle<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        // What this machine asks a real host for leaves from here in any case.
        let own = self.simulated("enter").ok().map(|own| (own.namespaces(), own.pin.clone()));
        std::thread::spawn(move || {
            let Some((namespaces, pin)) = own else { return work() };
            namespaces.enter().expect("a lab host can be entered while its handle lives");
            let pinned = pin.map(|pin| Pinned::to(&pin.programs));
            let _pinned = pinned.transpose().expect("processors that were there are there");
            work()
        })
    }

    /// As [`Host::thread`], and waits for the result. A panic of `work` goes on here.
    pub fn inside<T, F>(&self, work: F) -> T
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.thread(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Gives this host one more address on its interface, such as `10.77.0.50/24`.
    pub fn add_address(&self, cidr: &str) -> Result<(), LabError> {
        let device = match &self.place {
            Place::Simulated(_) => "eth0",
            Place::Real(real) => return real.add_address(cidr),
            Place::Here(device) => {
                let doing = || format!("give this machine {cidr}");
                let mut ip = Command::new("ip");
                ip.args(["address", "replace", cidr, "dev", device]);
                let done = ip.output().doing(doing)?;
                let said = String::from_utf8_lossy(&done.stderr).into_owned();
                let good = done.status.success().then_some(());
                return good.ok_or_else(|| io::Error::other(said)).doing(doing);
            }
        };
        let nodad = if cidr.contains(':') { "nodad" } else { "" };
        self.ip(&format!("address add {cidr} dev {device} {nodad}\n"))
    }

    /// Pulls the cable: the port of the switch goes down, in both directions.
    pub fn link_down(&self) -> Result<(), LabError> {
        self.simulated("pull its cable")?.switch.port_down(&self.port())
    }

    /// Plugs the cable in again.
    pub fn link_up(&self) -> Result<(), LabError> {
        self.simulated("plug its cable in")?.switch.port_up(&self.port())
    }

    /// The death of the host: the cable first, so that no dying process says goodbye, then
    /// SIGKILL to every process. Returns when all are gone, and tells when the cable was out.
    pub fn kill(&self) -> Result<Instant, LabError> {
        if let Place::Real(real) = &self.place {
            return real.kill();
        }
        self.link_down()?;
        let death = Instant::now();
        self.kill_processes()?;
        Ok(death)
    }

    /// The death of all programs of a host whose kernel lives on: sockets close, resets leave.
    pub fn kill_processes(&self) -> Result<(), LabError> {
        self.simulated("lose its programs")?.cell.kill_all()?;
        self.kill_strays()
    }

    /// Stops every process of the host in its tracks, as a hypervisor does; [`Host::thaw`] lets
    /// them go on.
    pub fn freeze(&self) -> Result<(), LabError> {
        self.simulated("freeze")?.cell.freeze(true)
    }

    /// Undoes [`Host::freeze`].
    pub fn thaw(&self) -> Result<(), LabError> {
        self.simulated("thaw")?.cell.freeze(false)
    }

    /// Starts a killed host anew: fresh namespaces, its disks as they were, `/run/hotspare`
    /// empty, no program running.
    pub fn boot(&self) -> Result<(), LabError> {
        let own = self.simulated("start anew")?;
        self.kill()?;
        let run = own.dir.join("run");
        fs::remove_dir_all(&run).doing(|| format!("empty {}", run.display()))?;
        match &own.wire {
            Some(wire) => wire.release(),
            None => own.switch.unplug(&self.port())?,
        }
        *lock(&own.namespaces) = furnish(&own.dir, &self.name, own.disk_bytes)?;
        self.plug_in()
    }

    /// The cgroup that accounts for the memory of those who have entered it: all processes with
    /// cgroup v2, with v1 those who are put there.
    /// Panics if the host is a real one.
    pub fn memory_group(&self) -> PathBuf {
        let own = self.simulated("limit its memory").expect("its memory is accounted for here");
        own.cell.memory_group()
    }

    /// True while any process of the host runs.
    pub fn is_alive(&self) -> Result<bool, LabError> {
        self.simulated("count its programs")?.cell.is_populated()
    }

    /// Processor time that all programs of the host have used so far, in seconds.
    pub fn used_s(&self) -> Result<f64, LabError> {
        match &self.place {
            Place::Simulated(own) => own.cell.used_s(),
            Place::Real(real) => real.used_s(),
            Place::Here(_) => Ok(0.0),
        }
    }

    /// Resident memory of all its programs but one, MB. What they share is counted for each.
    pub fn rss_mb_beside(&self, agent: &Process) -> f64 {
        let (pids, real) = match &self.place {
            Place::Simulated(own) => (own.cell.pids(), None),
            Place::Real(real) => (real.pids(), Some(real)),
            Place::Here(_) => return 0.0,
        };
        let others = pids.into_iter().filter(|pid| *pid != agent.pid());
        let status = |pid: i32| match real {
            Some(real) => real.proc(pid, "status"),
            None => fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default(),
        };
        let all = others.filter_map(|pid| {
            let status = status(pid);
            let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
            kib.trim().trim_end_matches(" kB").parse::<f64>().ok()
        });
        all.sum::<f64>() * 1024.0 / 1e6
    }

    fn port(&self) -> String {
        format!("p{}", self.number)
    }

    fn plug_in(&self) -> Result<(), LabError> {
        let own = self.simulated("plug its cable in")?;
        match &own.wire {
            Some(wire) => own.switch.plug_wire(&self.port(), &own.namespaces(), wire)?,
            None => own.switch.plug(&self.port(), &own.namespaces())?,
        }
        let (v4, v6) = (self.v4(), self.v6());
        self.ip(&format!(
            "link set lo up\naddress add {v4}/24 dev eth0\naddress add {v6}/64 dev eth0 nodad\n\
             link set eth0 up\n"
        ))
    }

    fn ip(&self, script: &str) -> Result<(), LabError> {
        switch::ip(&self.simulated("set its interfaces")?.namespaces(), script)
    }

    /// Kills what has left the cgroup but not the network of this host.
    fn kill_strays(&self) -> Result<(), LabError> {
        let namespaces = self.simulated("lose its programs")?.namespaces();
        let inode = namespaces.net_inode().doing(|| "read namespace".to_owned())?;
        let me = std::process::id() as i32;
        for entry in fs::read_dir("/proc").doing(|| "read /proc".to_owned())?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if pid != me && hotspare_kernel::namespace::is_in_net(pid, inode) {
                // It may be gone by now, which is what we want.
                let pid = nix::unistd::Pid::from_raw(pid);
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        }
        Ok(())
    }
}

/// Makes the namespaces of a host, with its own directories mounted over [`PRIVATE_DIRS`].
fn furnish(dir: &Path, name: &str, disk_bytes: Option<u64>) -> Result<Arc<Namespaces>, LabError> {
    for path in PRIVATE_DIRS {
        let own = dir.join(path.trim_start_matches('/'));
        fs::create_dir_all(&own).doing(|| format!("make {}", own.display()))?;
        fs::create_dir_all(path).doing(|| format!("make {path}"))?;
    }
    let mount_all = || -> io::Result<()> {
        for path in PRIVATE_DIRS {
            let own = dir.join(path.trim_start_matches('/'));
            mount(Some(&own), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        }
        if let Some(bytes) = disk_bytes {
            let options = format!("size={bytes}");
            let (none, flags) = (None::<&str>, MsFlags::empty());
            mount(none, strain::DISK, Some("tmpfs"), flags, Some(&*options))?;
        }
        Ok(())
    };
    let made = Namespaces::create(mount_all).doing(|| format!("make the namespaces of {name}"))?;
    Ok(Arc::new(made))
}

/// A lock whose holder panicked is still good: no state here is ever half changed.
#[must_use = "it is let go with the guard"]
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
