//! An agent that is killed must go away, whatever is under way.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hotspare_files::{ReplicatedDir, Role};

/// Set for the agent: the directory that has `backing` and `mount`.
const AGENT: &str = "HOTSPARE_TEST_AGENT";
const HANG: Duration = Duration::from_secs(30);

/// Serves and flushes for ever, as an agent does. Does nothing when it is run as a test.
#[test]
fn agent() {
    let Some(directory) = std::env::var_os(AGENT) else { return };
    let directory = std::path::PathBuf::from(directory);
    let (backing, mount) = (directory.join("backing"), directory.join("mount"));
    let served = ReplicatedDir::serve(&backing, &mount, Role::Primary).unwrap();
    drop(served.initial_copy());
    let _own = std::fs::File::create(mount.join("own")).unwrap();
    loop {
        served.flush().unwrap();
        drop(served.cut().unwrap());
        // Pages are dirty again when it dies.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Writes to a mapping of a file for ever.
const WRITER: &str = "
import mmap, sys
with open(sys.argv[1], 'w+b') as file:
    file.truncate(1 << 20)
    memory = mmap.mmap(file.fileno(), 1 << 20)
    while True:
        for page in range(256):
            memory[page << 12] = (memory[page << 12] + 1) & 255
";

fn ends(child: &mut Child) -> bool {
    let deadline = Instant::now() + HANG;
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

#[test]
fn an_agent_that_is_killed_while_pages_are_dirty_ends() {
    for round in 0..30u64 {
        let directory = tempfile::tempdir().unwrap();
        let mount = directory.path().join("mount");
        std::fs::create_dir(directory.path().join("backing")).unwrap();
        std::fs::create_dir(&mount).unwrap();
        let this = std::env::current_exe().unwrap();
        let mut agent = Command::new(this);
        agent.args(["--exact", "agent"]).env(AGENT, directory.path()).stdout(Stdio::null());
        let mut agent = agent.spawn().unwrap();
        while nix::sys::statfs::statfs(&mount).unwrap().filesystem_type()
            != nix::sys::statfs::FUSE_SUPER_MAGIC
        {
            assert!(agent.try_wait().unwrap().is_none(), "the agent serves");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut writer = Command::new("python3");
        let mut writer = writer.args(["-c", WRITER]).arg(mount.join("file")).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(150 + round * 3));
        assert!(writer.try_wait().unwrap().is_none(), "the writer writes");
        agent.kill().unwrap();
        writer.kill().unwrap();
        assert!(ends(&mut agent), "round {round}: the agent hangs in its own file system");
        assert!(ends(&mut writer), "round {round}: the writer hangs");
        let _ = nix::mount::umount2(&mount, nix::mount::MntFlags::MNT_DETACH);
    }
}
