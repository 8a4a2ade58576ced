//! Random operations with checkpoints at random instants: both trees stay equal in everything.
//!
//! `HOTSPARE_SEED=n` runs one seed; otherwise a few fixed and a few fresh ones run, each printed.

mod common;

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;

use common::{Host, Pair, assert_equal, checkpoint, copy};
use hotspare_files::Role;
use nix::fcntl::{AT_FDCWD, FallocateFlags, RenameFlags, fallocate, renameat2};

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }

    fn size(&mut self) -> u64 {
        let limit = [1, 100, 5000, 70_000, 300_000][self.below(5) as usize];
        self.below(limit)
    }
}

/// A guest that does whatever comes to its mind. Failing operations are part of the game.
struct Guest<'a> {
    root: &'a std::path::Path,
    random: Random,
    open: Vec<File>,
}

impl Guest<'_> {
    fn any_path(&mut self) -> PathBuf {
        let mut path = self.root.to_owned();
        for _ in 0..self.random.below(3) {
            path.push(format!("d{}", self.random.below(3)));
        }
        path.push(match self.random.below(4) {
            0 => format!("d{}", self.random.below(3)),
            _ => format!("f{}", self.random.below(6)),
        });
        path
    }

    fn open_some(&mut self) -> Option<File> {
        let path = self.any_path();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(self.random.below(9) == 0);
        let file = options.open(path).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        if self.random.below(2) == 0 && self.open.len() < 8 {
            self.open.push(file.try_clone().unwrap());
        }
        Some(file)
    }

    fn some_file(&mut self) -> Option<File> {
        if self.open.is_empty() || self.random.below(3) == 0 {
            return self.open_some();
        }
        let index = self.random.below(self.open.len() as u64) as usize;
        self.open[index].try_clone().ok()
    }

    fn change_content(&mut self) {
        let Some(file) = self.some_file() else { return };
        let (offset, length) = (self.random.size(), self.random.size());
        match self.random.below(8) {
            0 => drop(file.set_len(offset)),
            1 => {
                let mode = [
                    FallocateFlags::empty(),
                    FallocateFlags::FALLOC_FL_KEEP_SIZE,
                    FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE,
                    FallocateFlags::FALLOC_FL_ZERO_RANGE,
                ][self.random.below(4) as usize];
                let _ = fallocate(&file, mode, offset as i64, length as i64 + 1);
            }
            _ => {
                let byte = self.random.below(255) as u8 + 1;
                let mut bytes = vec![byte; length as usize];
                bytes.iter_mut().step_by(61).for_each(|byte| *byte ^= 0x55);
                file.write_all_at(&bytes, offset).unwrap();
            }
        }
    }

    fn change_names(&mut self) {
        let (one, other) = (self.any_path(), self.any_path());
        match self.random.below(9) {
            0 | 1 => drop(fs::create_dir(one)),
            2 => drop(fs::remove_file(one)),
            3 => drop(fs::remove_dir(one)),
            4 => drop(symlink("somewhere", one)),
            5 => drop(fs::hard_link(one, other)),
            6 => {
                let flags = RenameFlags::RENAME_EXCHANGE;
                let _ = renameat2(AT_FDCWD, &one, AT_FDCWD, &other, flags);
            }
            7 => {
                let _ = nix::unistd::mkfifo(&one, nix::sys::stat::Mode::S_IRWXU);
            }
            _ => drop(fs::rename(one, other)),
        }
    }

    fn change_attributes(&mut self) {
        let path = self.any_path();
        match self.random.below(4) {
            0 => {
                let mode = Permissions::from_mode(self.random.below(0o10000) as u32);
                drop(fs::set_permissions(path, mode));
            }
            1 => {
                let (uid, gid) = (self.random.below(9) as u32, self.random.below(9) as u32);
                drop(chown(path, Some(uid), Some(gid)));
            }
            2 => {
                let Some(file) = self.some_file() else { return };
                let name = [c"user.a", c"user.b"][self.random.below(2) as usize];
                let value = vec![b'v'; self.random.below(50) as usize];
                let _ = hotspare_kernel::set_xattr(file, name, &value, 0);
            }
            _ => {
                let Some(file) = self.some_file() else { return };
                let seconds = self.random.below(1 << 31);
                let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
                file.set_modified(time).unwrap();
            }
        }
    }

    fn act(&mut self) {
        match self.random.below(10) {
            0..4 => self.change_content(),
            4..8 => self.change_names(),
            8 => self.change_attributes(),
            _ => {
                if !self.open.is_empty() {
                    let index = self.random.below(self.open.len() as u64) as usize;
                    self.open.swap_remove(index);
                }
            }
        }
    }
}

fn seeds() -> Vec<u64> {
    if let Ok(seed) = std::env::var("HOTSPARE_SEED") {
        return vec![seed.parse().expect("HOTSPARE_SEED is a number")];
    }
    let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let fresh = fresh.subsec_nanos() as u64;
    (1..7).chain(fresh..fresh + 6).collect()
}

#[test]
fn random_operations_replicate_at_every_checkpoint() {
    for seed in seeds() {
        eprintln!("HOTSPARE_SEED={seed}");
        let pair = Pair::new();
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut guest = Guest { root: &pair.primary.mount, random, open: Vec::new() };
        for _ in 0..12 {
            for _ in 0..guest.random.below(60) {
                guest.act();
            }
            pair.checkpoint();
            pair.assert_equal();
        }
    }
}

/// Checkpoints while the guest runs are not exact, but nothing may get lost: once it stops, the
/// next one makes the trees equal. A second spare joins meanwhile.
#[test]
fn a_spare_that_joins_while_the_guest_runs_ends_up_equal() {
    for seed in seeds() {
        eprintln!("HOTSPARE_SEED={seed}");
        let pair = Pair::new();
        let late = Host::new(Role::Spare, |_| {});
        let root = &pair.primary.mount;
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut guest = Guest { root, random, open: Vec::new() };
        for _ in 0..100 {
            guest.act();
        }
        std::thread::scope(|scope| {
            let running = scope.spawn(move || {
                for _ in 0..400 {
                    guest.act();
                }
                guest
            });
            copy(&pair.primary, &late);
            while !running.is_finished() {
                checkpoint(&pair.primary, &[&pair.spare, &late]);
            }
            // Its open files stay open until the last checkpoint.
            let _guest = running.join().unwrap();
            checkpoint(&pair.primary, &[&pair.spare, &late]);
            pair.assert_equal();
            assert_equal(root, &late.mount);
        });
    }
}
