//! Files of /proc that are read at every checkpoint.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;

/// A file that stays open between reads. The kernel makes its text anew at each read from the
/// start. One of /proc/PID belongs to that process or thread for good: when it has ended, reading
/// fails, whoever has its number then.
#[derive(Debug)]
pub struct KeptFile {
    path: String,
    file: Option<File>,
}

/// Numbers above this are not kept, so that a guest with very many threads does not take all of
/// our descriptors.
const KEPT_MAX: i32 = 8192;

impl KeptFile {
    /// A file that is opened when it is first read.
    pub fn new(path: String) -> Self {
        Self { path, file: None }
    }

    /// `/proc/PID/NAME`.
    pub fn of(pid: HostPid, name: &str) -> Self {
        Self::new(format!("/proc/{pid}/{name}"))
    }

    /// Reads all of it into `text`.
    pub fn read(&mut self, verb: &'static str, text: &mut Vec<u8>) -> Result<()> {
        let opened;
        let file = match &self.file {
            Some(file) => file,
            None => {
                let file = File::open(&self.path).map_err(KernelError::io(verb))?;
                if file.as_raw_fd() < KEPT_MAX {
                    self.file.insert(file)
                } else {
                    opened = file;
                    &opened
                }
            }
        };
        text.resize(text.capacity().max(4096), 0);
        let mut done = 0;
        loop {
            match file.read_at(&mut text[done..], done as u64) {
                Ok(0) => {
                    text.truncate(done);
                    return Ok(());
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(KernelError::io(verb)(error)),
            }
            if done == text.len() {
                text.resize(done * 2, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_file_is_read_anew_and_whole() {
        let own = HostPid(std::process::id() as i32);
        let (mut maps, mut text) = (KeptFile::of(own, "maps"), Vec::new());
        for _ in 0..3 {
            maps.read("read maps", &mut text).expect("reads");
            assert!(text.ends_with(b"\n") && text.windows(7).any(|word| word == b"[stack]"));
        }
        let mut score = KeptFile::of(own, "oom_score_adj");
        score.read("read score", &mut text).expect("reads");
        let before = text.clone();
        let high = if before == b"1000\n" { "999" } else { "1000" };
        std::fs::write("/proc/self/oom_score_adj", high).expect("writes");
        score.read("read score", &mut text).expect("reads");
        assert_eq!(text, format!("{high}\n").as_bytes());
    }
}
