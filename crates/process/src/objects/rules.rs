//! What the user said about the guest's paths (`--files`).

/// How the spare comes to have a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Both hosts see the same storage.
    Shared,
    /// Changes travel with the checkpoint.
    Replicated,
    /// Both hosts have it, equal; the guest cannot change it.
    Compared,
}

/// Path prefixes and their standing; what lies under none is compared.
#[derive(Clone, Debug, Default)]
pub struct FileRules {
    // Longest first.
    rules: Vec<(String, Standing)>,
}

impl FileRules {
    /// Rules from absolute directories in the guest. Of two that nest, the inner one counts.
    pub fn new(directories: impl IntoIterator<Item = (String, Standing)>) -> Self {
        let mut rules: Vec<_> = directories
            .into_iter()
            .map(|(path, standing)| (path.trim_end_matches('/').to_owned(), standing))
            .collect();
        rules.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        Self { rules }
    }

    /// Standing of the file at `path`.
    pub fn standing(&self, path: &str) -> Standing {
        self.rule(path).map_or(Standing::Compared, |(_, standing)| *standing)
    }

    /// The declared directory that `path` lies under.
    pub fn root(&self, path: &str) -> Option<&str> {
        self.rule(path).map(|(root, _)| if root.is_empty() { "/" } else { root.as_str() })
    }

    fn rule(&self, path: &str) -> Option<&(String, Standing)> {
        self.rules.iter().find(|(root, _)| {
            path.strip_prefix(root.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_directory_decides() {
        let rules = FileRules::new([
            ("/data/".to_owned(), Standing::Replicated),
            ("/data/nfs".to_owned(), Standing::Shared),
        ]);
        assert_eq!(rules.standing("/data/x"), Standing::Replicated);
        assert_eq!(rules.standing("/data"), Standing::Replicated);
        assert_eq!(rules.standing("/data/nfs/x"), Standing::Shared);
        assert_eq!(rules.standing("/database"), Standing::Compared);
        assert_eq!(rules.root("/data/nfs/x"), Some("/data/nfs"));
        assert_eq!(rules.root("/etc/passwd"), None);
    }
}
